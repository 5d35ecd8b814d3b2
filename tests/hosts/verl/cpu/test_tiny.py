"""The tiny task in verl's formats."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("reasoning_gym")
pytest.importorskip("datasets")

from datasets import Dataset

from rlx_plugins.hosts.verl.cpu.tiny import compute_score, tiny_files


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    files = tiny_files(train_size=20, eval_size=10, cache_dir=tmp_path_factory.mktemp("cache"))
    return [Dataset.from_parquet(str(file), cache_dir=str(file.parent)).to_list() for file in files]


def score(row, text, **weights):
    truth = row["reward_model"]["ground_truth"]
    return compute_score(row["data_source"], text, truth, row["extra_info"], **weights)


def test_the_files_have_the_columns_verl_reads(rows):
    train, held_out = rows
    assert [len(train), len(held_out)] == [20, 10]
    row = train[3]
    assert row["prompt"] == [{"role": "user", "content": row["prompt"][0]["content"]}]
    assert row["data_source"] == "rlx_tiny"
    assert row["extra_info"]["index"] == 3
    assert json.loads(row["extra_info"]["entry"])["answer"] == row["reward_model"]["ground_truth"]


def test_no_problem_is_in_both_files(rows):
    train, held_out = ({row["prompt_key"] for row in split} for split in rows)
    assert len(train) == 20 and not train & held_out


def test_the_solution_scores_full_marks(rows):
    row = rows[0][0]
    brevity = 1 - len(row["solution"]) / 20
    expected = {"score": 1.0, "accuracy": 1.0, "format": 1.0, "brevity": pytest.approx(brevity)}
    assert score(row, row["solution"]) == expected


def test_a_wrong_answer_in_a_right_form_scores_the_form_only(rows):
    row = rows[0][0]
    wrong = row["solution"] + "0"
    assert score(row, wrong)["score"] == 0
    assert score(row, wrong, format=0.5)["score"] == 0.5
    assert score(row, "", brevity=2.0)["score"] == 2.0
