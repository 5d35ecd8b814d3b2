"""A dataset as a recipe's task, in the form of either host."""

import json

import pytest

pytest.importorskip("datasets")

from datasets import Dataset

import rlx_plugins as rlx
from rlx_plugins.recipes.data_task import DataTask
from rlx_plugins.recipes.schema import load
from rlx_plugins.recipes.task import load_task, reward_names

ROWS = [
    {"question": "1+1?", "answer": "one and one\n#### 2", "source": "easy"},
    {"question": "2+2?", "answer": r"\boxed{4}", "source": "hard"},
]


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_text("\n".join(map(json.dumps, ROWS)))
    return path


def task(file, **changes):
    return DataTask(**{"dataset": str(file), "prompt": "question", "columns": {"domain": "source"}, **changes})


def test_trl_gets_messages_answers_and_named_columns(file):
    made = load_task(task(file, instruction="Box it."), seed=0)
    assert made.train.to_list() == [
        {"prompt": [{"role": "user", "content": "1+1?\n\nBox it."}], "answer": "2", "domain": "easy"},
        {"prompt": [{"role": "user", "content": "2+2?\n\nBox it."}], "answer": "4", "domain": "hard"},
    ]
    assert made.reward("accuracy")([r"\boxed{2}"], ["2"]) == [1.0]
    assert reward_names(task(file)) == ("accuracy", "format")


def test_verl_gets_parquet_files_with_its_columns(file, tmp_path):
    train, held_out = task(file, eval="train").verl_files(tmp_path / "out")
    row = Dataset.from_parquet(str(train), cache_dir=str(tmp_path))[0]
    assert row["reward_model"] == {"ground_truth": "2", "style": "rule"}
    assert row["extra_info"] == {"index": 0, "split": "train"} and row["data_source"] == str(file)
    assert (row["domain"], row["prompt"][0]["content"]) == ("easy", "1+1?")
    assert held_out is not None and held_out.exists()
    assert task(file).verl_files(tmp_path / "out")[1] is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompt": "questions"}, r"no column 'questions' for prompt; did you mean 'question'"),
        ({"columns": {"hint": "tips"}}, r"no column 'tips' for hint"),
        ({"dataset": "nowhere.jsonl"}, r"the dataset 'nowhere\.jsonl' can't be loaded"),
    ],
)
def test_what_the_data_lacks_is_named(file, changes, message):
    with pytest.raises(rlx.ConfigError, match=message):
        load_task(task(file, **changes), seed=0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{dataset: x, promt: y}", r":6: unknown key 'profiles\.tiny\.task\.promt'; did you mean 'prompt'"),
        ("{prompt: y}", r":6: the key 'profiles\.tiny\.task\.dataset' is missing"),
        ("3", r":6: profiles\.tiny\.task: .*got 3"),
    ],
)
def test_a_mistake_in_the_task_is_named_with_its_line(tmp_path, text, message):
    path = tmp_path / "recipe.yaml"
    path.write_text(f"name: a\ntitle: A\nhost: trl\nprofiles:\n  tiny:\n    task: {text}\n")
    with pytest.raises(rlx.ConfigError, match=message):
        load(path)
