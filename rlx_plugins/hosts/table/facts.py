"""What an environment would report about a response, read off its tokens: answers, tagged units, tools built or used.

A run of equal steps is a unit: GOOD steps are easy ones, BAD steps hard ones, and a unit of one token is not what its
tag says (an easy one that reflects, a hard one that does not).
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import groupby
from typing import Any

from ...core.trajectory import Rollout
from .policy import BAD, CALL, GOOD, score


def answer(r: Rollout) -> str | None:
    """How many right steps, as text; None where the response was cut off."""
    return str(r.tokens.count(GOOD)) if r.stop == "eos" else None


def peer_answers(r: Rollout) -> list[list[str]]:
    """Answers of one other model to the prompt, the same for all its rollouts."""
    return [[str(len(r.prompt_key)), "1", str(r.prompt[0] % 3)]]


def units(r: Rollout, kind: int) -> list[int]:
    """Lengths of the units of one kind (GOOD: easy, BAD: hard)."""
    return [len(list(run)) for token, run in groupby(r.tokens) if token == kind]


def smith_facts(r: Rollout) -> dict[str, Any]:
    """Prompts with an even number ask for a tool, the others use one."""
    tokens, ended = r.tokens, r.stop == "eos"
    correct = score(tokens, ended)[0]
    if r.prompt[0] % 2:
        used = {"turns": 1 + tokens.count(CALL), "calls_ok": tokens.count(CALL), "final_answer": ended}
        return {"role": "use", "correct": correct, **used}
    return {
        "role": "build",
        "blocks_ok": ended,
        "names_ok": GOOD in tokens,
        "params_ok": tokens.count(BAD) < 3,
        "schema_bad": False,
        "questions": [[correct, tokens.count(CALL)]],
        "judge": [min(5, tokens.count(GOOD))],
        "align": "ok",
    }


FACTS: dict[str, Callable[[Rollout], Any]] = {
    "answer": answer,
    "peer_answers": peer_answers,
    "smith_facts": smith_facts,
    "format_ok": lambda r: float(r.stop == "eos"),
    "easy_units": lambda r: len(units(r, GOOD)),
    "hard_units": lambda r: len(units(r, BAD)),
    "easy_with_reflection": lambda r: units(r, GOOD).count(1) > 1,
    "hard_without_reflection": lambda r: units(r, BAD).count(1) > 2,
    "easy_tokens": lambda r: sum(units(r, GOOD)),
    "hard_tokens": lambda r: sum(units(r, BAD)),
}
"""Column -> how it is read off a finished rollout: `TableHost(fields=FACTS)`."""
