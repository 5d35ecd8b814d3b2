"""A procedural, verifiable task for the tiny lane: problems, data sets, rewards and held-out evaluation.

The problems and the verifier are reasoning_gym's ``chain_sum`` ("3 + 8 - 5 + 2 ="): the prompt is the bare expression
``3+8-5+2=``, a full solution works it off term by term, ``11-5=6+2=8``, and what stands after the last ``=`` is the
answer. Answering without the working (``8``) is allowed and short, but hard for a model of two layers, so that accuracy
and brevity pull in different directions. Training and held-out problems are told apart by a hash of the question text:
no seed and no size can make them overlap.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import random

    from datasets import Dataset
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

__all__ = [
    "TASKS",
    "TINY_GRPO_ARGS",
    "Problem",
    "TinyTask",
    "accuracy_reward",
    "brevity_reward",
    "demonstration",
    "format_reward",
    "greedy_accuracy",
    "problems",
    "tiny_dataset",
    "tiny_grpo_args",
]

SPLITS = ("train", "eval")
_EVAL_ONE_IN = 5
_SEED_STRIDE = 10_000_019  # the generator draws item i from Random(seed + i): neighbouring seeds must not be neighbours
_ANSWER = re.compile(r"[^=]*\Z")


@dataclass(frozen=True)
class TinyTask:
    """One setting of reasoning_gym's ``chain_sum``; the number of terms is the problem's domain.

    ``max_completion_length`` bounds a full solution with its end-of-sequence token, in characters (= tokens).
    """

    name: str
    min_terms: int
    max_terms: int
    digits: int
    max_completion_length: int


TASKS: dict[str, TinyTask] = {
    task.name: task
    for task in (
        TinyTask("chain_sum", min_terms=3, max_terms=5, digits=1, max_completion_length=26),
        TinyTask("chain_sum_short", min_terms=2, max_terms=3, digits=1, max_completion_length=10),
    )
}


@dataclass(frozen=True)
class Problem:
    """A problem with what is needed to show, solve and score it; ``entry`` is reasoning_gym's own record of it."""

    expression: str
    answer: str
    terms: int
    entry: dict[str, Any]

    @property
    def prompt(self) -> str:
        return f"{self.expression}="

    @property
    def solution(self) -> str:
        """The working term by term, ending in the answer."""
        return _working(self.expression, [0] * (self.terms - 1))


def _task(name: str) -> TinyTask:
    if name not in TASKS:
        raise ValueError(f"unknown tiny task {name!r}; accepted: {', '.join(TASKS)}")
    return TASKS[name]


@lru_cache(maxsize=None)
def _chain_sum(min_terms: int, max_terms: int, digits: int, seed: int) -> Any:
    try:
        import reasoning_gym
    except ImportError as error:
        raise ImportError("the tiny tasks need reasoning_gym: pip install reasoning-gym==0.1.25") from error
    return reasoning_gym.create_dataset(
        "chain_sum",
        seed=seed,
        size=2**31,
        min_terms=min_terms,
        max_terms=max_terms,
        min_digits=digits,
        max_digits=digits,
    )


def _split_of(question: str) -> str:
    digest = hashlib.sha256(question.encode()).digest()
    return "eval" if int.from_bytes(digest[:8], "big") % _EVAL_ONE_IN == 0 else "train"


def _candidates(task: TinyTask, seed: int, tries: int) -> Iterator[Problem]:
    generator = _chain_sum(task.min_terms, task.max_terms, task.digits, seed * _SEED_STRIDE)
    for i in range(tries):
        entry = generator[i]
        expression = entry["metadata"]["expression"].replace(" ", "")
        yield Problem(expression, entry["answer"], entry["metadata"]["num_terms"], entry)


def problems(task: str = "chain_sum", split: str = "train", size: int = 1000, seed: int = 0) -> list[Problem]:
    """Draws ``size`` different problems of one split, the same ones for the same arguments.

    A problem belongs to a split by a hash of its question text (one in five is held out), whatever the seed.
    Raises ``ValueError`` for an unknown task or split and when the task has too few problems for ``size``.
    """
    if split not in SPLITS:
        raise ValueError(f"unknown split {split!r}; accepted: {', '.join(SPLITS)}")
    if size < 1:
        raise ValueError(f"size must be at least 1, got {size}")
    found: dict[str, Problem] = {}
    for problem in _candidates(_task(task), seed, tries=1000 + 30 * size):
        if _split_of(problem.entry["question"]) == split:
            found.setdefault(problem.entry["question"], problem)
            if len(found) == size:
                return list(found.values())
    raise ValueError(f"task {task!r} gave only {len(found)} different {split} problems for seed {seed}, not {size}")


def _terms(expression: str) -> list[int]:
    return [int(term) for term in re.findall(r"[+-]?\d+", expression)]


def _working(expression: str, slips: Sequence[int]) -> str:
    """The chain of equations for ``expression``; ``slips[i]`` is added to the i-th running total and carried on."""
    first, *rest = _terms(expression)
    total, working = first, f"{first}"
    for term, slip in zip(rest, slips, strict=True):
        total += term + slip
        working += f"{term:+d}={total}"
    return working


def demonstration(problem: Problem, rng: random.Random, slip: float, direct: float) -> str:
    """A noisy demonstration for the warm-up: imperfect on purpose, so that reinforcement has something to improve.

    With probability ``direct`` it states the answer without working. Each running total (or the bare answer) is off by
    one to three with probability ``slip``, and the working goes on from the wrong value.
    """
    slips = [rng.choice((-3, -2, -1, 1, 2, 3)) if rng.random() < slip else 0 for _ in range(problem.terms - 1)]
    working = _working(problem.expression, slips)
    return working.rsplit("=", 1)[-1] if rng.random() < direct else working


def tiny_dataset(split: str = "train", size: int = 1000, seed: int = 0, task: str = "chain_sum") -> Dataset:
    """Problems as a ``datasets.Dataset`` ready for TRL's GRPOTrainer.

    Columns: ``prompt`` (conversational), ``answer``, ``entry`` (reasoning_gym's record as JSON, needed to score),
    ``solution`` (text of a correct completion), ``domain`` (number of terms, e.g. ``"3 terms"``) and ``prompt_key``
    (stable across seeds, sizes and runs).
    """
    from datasets import Dataset

    return Dataset.from_list(
        [
            {
                "prompt": [{"role": "user", "content": problem.prompt}],
                "answer": problem.answer,
                "entry": json.dumps(problem.entry),
                "solution": problem.solution,
                "domain": f"{problem.terms} terms",
                "prompt_key": f"chain_sum/{problem.expression}",
            }
            for problem in problems(task, split, size, seed)
        ]
    )


def _text(completion: Any) -> str:
    """The text of a plain or conversational completion."""
    return completion if isinstance(completion, str) else "".join(turn["content"] for turn in completion)


def accuracy_reward(completions: Sequence[Any], entry: Sequence[str], **columns: Any) -> list[float]:
    """1 if what follows the last ``=`` is the answer by reasoning_gym's own verifier, else 0 (no partial credit)."""
    verifier = _chain_sum(2, 2, 1, 0)
    answers = (_ANSWER.search(_text(completion)).group().strip() for completion in completions)
    return [float(verifier.score_answer(a, json.loads(e)) == 1.0) for a, e in zip(answers, entry, strict=True)]


def format_reward(completions: Sequence[Any], entry: Sequence[str], **columns: Any) -> list[float]:
    """1 if the completion is a complete working that takes the problem's terms in order, right or wrong, else 0."""
    return [float(_is_working(_text(c), json.loads(e))) for c, e in zip(completions, entry, strict=True)]


def _is_working(text: str, entry: dict[str, Any]) -> bool:
    first, *rest = _terms(entry["metadata"]["expression"].replace(" ", ""))
    pattern = f"{first}" + "".join(rf"{re.escape(f'{term:+d}')}=-?\d+" for term in rest)
    return re.fullmatch(pattern, text) is not None


def brevity_reward(completions: Sequence[Any], **columns: Any) -> list[float]:
    """1 for an empty completion, falling linearly to 0 at 20 characters."""
    return [max(0.0, 1.0 - len(_text(completion)) / 20) for completion in completions]
