"""A procedural, verifiable task for the tiny lane: problems, data sets, rewards and held-out evaluation.

The problems and the verifier are reasoning_gym's ``chain_sum`` ("3 + 8 - 5 + 2 ="): the prompt is the bare expression
``3+8-5+2=``, a full solution works it off term by term, ``3+8=11-5=6+2=8``, and what stands after the last ``=`` is the
answer. Answering without the working (``=8``) is allowed and short, but hard for a model of three layers: accuracy and
brevity pull in different directions. Training and held-out problems are told apart by a hash of the question text:
no seed and no size can make them overlap.
"""

from __future__ import annotations

import hashlib
import json
import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

__all__ = [
    "COLUMNS",
    "FACTS",
    "TASKS",
    "TINY_GRPO_ARGS",
    "Problem",
    "TinyTask",
    "accuracy_reward",
    "brevity_reward",
    "demonstration",
    "facts",
    "format_reward",
    "greedy_accuracy",
    "problems",
    "refuse_overlap",
    "tiny_dataset",
    "tiny_grpo_args",
]

SPLITS = ("train", "eval")
_EVAL_ONE_IN = 5
_SEED_STRIDE = 10_000_019  # the generator draws item i from Random(seed + i): neighbouring seeds must not be neighbours


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
        TinyTask("chain_sum", min_terms=3, max_terms=4, digits=1, max_completion_length=20),
        TinyTask("chain_sum_short", min_terms=2, max_terms=3, digits=1, max_completion_length=14),
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
        return solution_of(self.expression)

    @property
    def hint(self) -> str:
        """The first step of the working."""
        first, second, *_ = terms_of(self.expression)
        return f"{first}{second:+d}={first + second}"

    @property
    def difficulty(self) -> float:
        """A guess of how often a working goes wrong: one step in ten."""
        return 1 - 0.9 ** (self.terms - 1)


def _task(name: str) -> TinyTask:
    if name not in TASKS:
        raise ValueError(f"unknown tiny task {name!r}; accepted: {', '.join(TASKS)}")
    return TASKS[name]


@cache
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


def terms_of(expression: str) -> list[int]:
    """The signed terms of a sum."""
    return [int(term) for term in re.findall(r"[+-]?\d+", expression)]


def working(expression: str, slips: Sequence[int]) -> str:
    """The chain of equations for ``expression``; ``slips[i]`` is added to the i-th running total and carried on."""
    first, *rest = terms_of(expression)
    total, chain = first, f"{first}"
    for term, slip in zip(rest, slips, strict=True):
        total += term + slip
        chain += f"{term:+d}={total}"
    return chain


def solution_of(expression: str) -> str:
    """The working without a slip."""
    return working(expression, [0] * (len(terms_of(expression)) - 1))


def demonstration(problem: Problem, rng: random.Random, slip: float, direct: float) -> str:
    """A noisy demonstration for the warm-up: imperfect on purpose, so that reinforcement has something to improve.

    With probability ``direct`` it states the answer without working. Each running total (or the bare answer) is off by
    one to three with probability ``slip``, and the working goes on from the wrong value.
    """
    slips = [rng.choice((-3, -2, -1, 1, 2, 3)) if rng.random() < slip else 0 for _ in range(problem.terms - 1)]
    shown = working(problem.expression, slips)
    return f"={shown.rpartition('=')[2]}" if rng.random() < direct else shown


COLUMNS = (
    *("prompt", "answer", "entry", "solution", "hint", "domain", "difficulty", "value_prior", "target", "budget"),
    *("embedding", "prompt_key"),
)
"""Columns of ``tiny_dataset``."""


def tiny_dataset(split: str = "train", size: int = 1000, seed: int = 0, task: str = "chain_sum") -> Dataset:
    """Problems as a ``datasets.Dataset`` ready for TRL's GRPOTrainer, with the columns ``COLUMNS``.

    ``prompt`` (conversational), ``answer``, ``entry`` (reasoning_gym's record as JSON, needed to score), ``solution``
    (text of a correct completion), ``hint`` (its first step), ``domain`` (number of terms, e.g. ``"3 terms"``),
    ``difficulty`` in [0, 1] and ``value_prior``, its complement (guesses, by the number of terms), ``target`` (the
    answer as a number), ``budget`` (tokens, four a term), ``embedding`` (the terms) and ``prompt_key`` (stable across
    seeds, sizes and runs).
    """
    from datasets import Dataset

    return Dataset.from_list(
        [
            {
                "prompt": [{"role": "user", "content": problem.prompt}],
                "answer": problem.answer,
                "entry": json.dumps(problem.entry),
                "solution": problem.solution,
                "hint": problem.hint,
                "domain": f"{problem.terms} terms",
                "difficulty": problem.difficulty,
                "value_prior": 1 - problem.difficulty,
                "target": float(problem.answer),
                "budget": 4 * problem.terms,
                "embedding": [*map(float, terms_of(problem.expression)), *[0.0] * (4 - problem.terms)],
                "prompt_key": f"chain_sum/{problem.expression}",
            }
            for problem in problems(task, split, size, seed)
        ]
    )


def refuse_overlap(train: Dataset, held_out: Dataset) -> None:
    """Raises ``ValueError`` when a held-out problem is also a training problem; for data sets put together by hand."""
    shared = sorted(set(train["prompt_key"]) & set(held_out["prompt_key"]))
    if shared:
        raise ValueError(f"{len(shared)} held-out problems are also training problems, among them {shared[0]!r}")


def _text(completion: Any) -> str:
    """The text of a plain or conversational completion."""
    return completion if isinstance(completion, str) else "".join(turn["content"] for turn in completion)


def _stated(text: str) -> str:
    """What follows the last ``=``."""
    return text.rpartition("=")[2].strip()


def _is_right(answer: str, entry: dict[str, Any]) -> bool:
    return _chain_sum(2, 2, 1, 0).score_answer(answer, entry) == 1.0


def accuracy_reward(
    completions: Sequence[Any],
    entry: Sequence[str],
    log_extra: Callable[[str, list[Any]], None] | None = None,
    **columns: Any,
) -> list[float]:
    """1 if what follows the last ``=`` is the answer by reasoning_gym's own verifier, else 0 (no partial credit).

    TRL's ``log_extra`` is told the ``facts`` of every completion, which a run may take as signals.
    """
    texts, entries = [_text(completion) for completion in completions], [json.loads(e) for e in entry]
    if log_extra is not None:
        told = [facts(text, e) for text, e in zip(texts, entries, strict=True)]
        for name in FACTS:
            log_extra(name, [row[name] for row in told])
    return [float(_is_right(_stated(text), e)) for text, e in zip(texts, entries, strict=True)]


FACTS = (
    *(
        "answer",
        "predicted",
        "format_ok",
        "easy_units",
        "hard_units",
        "easy_with_reflection",
        "hard_without_reflection",
    ),
    *("peer_answers", "smith_facts"),
)
"""What ``facts`` tells of a response."""


def facts(text: str, entry: dict[str, Any]) -> dict[str, Any]:
    """What methods read of a response beside its reward, by the names they read it under.

    ``answer`` (None if it is no number) and ``predicted`` (NaN then); ``format_ok``; a bare answer is one fast
    (``easy``) unit, a step of the working a slow (``hard``) one, neither in the wrong place; ``peer_answers``, those of
    one other member of an ensemble, which slips like the warm-up's demonstrations; ``smith_facts``, with the steps as
    turns and those that are right as successful calls.
    """
    problem = Problem(
        entry["metadata"]["expression"].replace(" ", ""), entry["answer"], entry["metadata"]["num_terms"], entry
    )
    answer = _stated(text)
    number = re.fullmatch(r"-?\d+", answer) is not None
    totals, right = (re.findall(r"\d=(-?\d+)", chain) for chain in (text, problem.solution))
    peer = random.Random(entry["question"])
    return {
        "answer": answer if number else None,
        "predicted": float(answer) if number else float("nan"),
        "format_ok": number,
        "easy_units": int(number and not totals),
        "hard_units": len(totals),
        "easy_with_reflection": 0,
        "hard_without_reflection": 0,
        "peer_answers": [[_stated(demonstration(problem, peer, slip=0.1, direct=0.5)) for _ in range(4)]],
        "smith_facts": {
            "role": "use",
            "correct": _is_right(answer, entry),
            "turns": len(totals),
            "calls_ok": sum(map(str.__eq__, totals, right)),
            "final_answer": number,
        },
    }


def format_reward(completions: Sequence[Any], entry: Sequence[str], **columns: Any) -> list[float]:
    """1 if the completion is a complete working that takes the problem's terms in order, right or wrong, else 0."""
    return [float(_is_working(_text(c), json.loads(e))) for c, e in zip(completions, entry, strict=True)]


def _is_working(text: str, entry: dict[str, Any]) -> bool:
    first, *rest = terms_of(entry["metadata"]["expression"].replace(" ", ""))
    pattern = f"{first}" + "".join(rf"{re.escape(f'{term:+d}')}=-?\d+" for term in rest)
    return re.fullmatch(pattern, text) is not None


def brevity_reward(completions: Sequence[Any], **columns: Any) -> list[float]:
    """1 for an empty completion, falling linearly to 0 at 20 characters."""
    return [max(0.0, 1.0 - len(_text(completion)) / 20) for completion in completions]


def greedy_accuracy(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    dataset: Dataset,
    batch_size: int = 256,
    max_new_tokens: int = 20,
) -> float:
    """The share of ``dataset`` that greedy decoding answers correctly, by ``accuracy_reward``.

    ``dataset`` has the columns of ``tiny_dataset``; prompts may be conversational or plain. The model stays on its
    device and gets its training mode back.
    """
    import torch

    training = model.training
    generate: Any = model.generate
    model.eval()
    right = 0.0
    try:
        for start in range(0, len(dataset), batch_size):
            rows = dataset[start : start + batch_size]
            texts = [
                prompt
                if isinstance(prompt, str)
                else tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=False)
                for prompt in rows["prompt"]
            ]
            encoded = tokenizer(
                texts, return_tensors="pt", padding=True, padding_side="left", add_special_tokens=False
            ).to(model.device)
            with torch.no_grad():
                generated = generate(
                    input_ids=encoded["input_ids"],
                    attention_mask=encoded["attention_mask"],
                    max_new_tokens=max_new_tokens,
                    do_sample=False,
                    pad_token_id=tokenizer.pad_token_id,
                    eos_token_id=tokenizer.eos_token_id,
                )
            completions = tokenizer.batch_decode(
                generated[:, encoded["input_ids"].shape[1] :], skip_special_tokens=True
            )
            right += sum(accuracy_reward(completions, rows["entry"]))
    finally:
        model.train(training)
    return right / len(dataset)


TINY_GRPO_ARGS: dict[str, Any] = {
    "per_device_train_batch_size": 128,
    "num_generations": 8,
    "max_completion_length": 20,
    "learning_rate": 2e-4,
    "lr_scheduler_type": "constant_with_warmup",
    "warmup_steps": 5,
    "adam_beta2": 0.99,
    "weight_decay": 0.0,
    "max_grad_norm": 1.0,
    "temperature": 1.0,
    "beta": 0.0,
    "max_steps": 120,
    "bf16": False,
    "gradient_checkpointing": False,
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": "none",
}
"""Arguments of TRL's ``GRPOConfig`` under which plain GRPO visibly learns the default task."""


def tiny_grpo_args(**overrides: Any) -> dict[str, Any]:
    """``TINY_GRPO_ARGS`` with ``use_cpu`` set where there is no CUDA device, and ``overrides`` on top."""
    import torch

    return {**TINY_GRPO_ARGS, "use_cpu": not torch.cuda.is_available(), **overrides}
