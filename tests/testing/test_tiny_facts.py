"""What the tiny task tells methods of a prompt and of a response."""

from __future__ import annotations

import json
import math

import pytest

pytest.importorskip("reasoning_gym")
pytest.importorskip("datasets")

from rlx_plugins.testing.tiny_tasks import FACTS, Problem, accuracy_reward, facts, tiny_dataset

ENTRY = {"question": "3 + 8 - 5 =", "answer": "6", "metadata": {"expression": "3 + 8 - 5", "num_terms": 3}}


def test_columns_of_a_prompt_follow_from_the_problem():
    row = next(r for r in tiny_dataset("train", 40) if r["domain"] == "3 terms")
    first = row["solution"].split("=")
    assert row["hint"] == f"{first[0]}={row['hint'].rpartition('=')[2]}" and row["solution"].startswith(row["hint"])
    assert row["target"] == float(row["answer"]) and row["budget"] == 12
    assert (row["difficulty"], row["value_prior"]) == (pytest.approx(0.19), pytest.approx(0.81))
    assert sum(row["embedding"]) == row["target"] and len(row["embedding"]) == 4


def test_a_problem_knows_its_first_step_and_its_difficulty():
    problem = Problem("3+8-5", "6", 3, ENTRY)
    assert (problem.hint, problem.solution) == ("3+8=11", "3+8=11-5=6")


@pytest.mark.parametrize(
    ("text", "answer", "units", "use"),
    [
        ("3+8=11-5=6", "6", (0, 2), (True, 2, 2, True)),
        ("3+8=12-5=7", "7", (0, 2), (False, 2, 0, True)),
        ("3+8=11-5=7", "7", (0, 2), (False, 2, 1, True)),
        ("=6", "6", (1, 0), (True, 0, 0, True)),
        ("3+8=11-", None, (0, 1), (False, 1, 1, False)),
        ("", None, (0, 0), (False, 0, 0, False)),
    ],
)
def test_facts_of_a_response(text, answer, units, use):
    told = facts(text, ENTRY)
    assert set(told) == set(FACTS)
    assert (told["answer"], told["format_ok"]) == (answer, answer is not None)
    assert told["predicted"] == float(answer) if answer else math.isnan(told["predicted"])
    assert (told["easy_units"], told["hard_units"]) == units
    smith = told["smith_facts"]
    assert (smith["correct"], smith["turns"], smith["calls_ok"], smith["final_answer"]) == use


def test_the_peer_answers_a_prompt_the_same_way_every_time():
    (answers,) = facts("=6", ENTRY)["peer_answers"]
    assert len(answers) == 4 and facts("", ENTRY)["peer_answers"] == [answers]
    assert answers.count("6") >= 2


def test_the_accuracy_reward_reports_the_facts_to_trl():
    told = {}
    rewards = accuracy_reward(["=6", "=7"], [json.dumps(ENTRY)] * 2, log_extra=told.__setitem__)
    assert rewards == [1.0, 0.0] and told["answer"] == ["6", "7"] and set(told) == set(FACTS)
