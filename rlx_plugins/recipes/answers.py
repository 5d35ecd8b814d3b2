"""Short final answers: taken from a response's last \\boxed{}, and compared with the reference.

Meant for sets whose answers are numbers or short expressions. They are compared as written, after LaTeX's ways of
writing the same are undone; it does no algebra. Where that is needed, name a reward of your own, such as
`trl.rewards:accuracy_reward`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

_DROPPED = re.compile(r"\\left|\\right|\\!|\\,|\\;|\\ |\\%|%|\\\$|\$|\s|\\text\{[^{}]*\}|\^\{?\\circ\}?|\.$")
_FRACTION = re.compile(r"(-?)\\frac\{(-?\d+)\}\{(-?\d+)\}")


def boxed(text: str) -> str | None:
    """What stands in the last \\boxed{}, whose braces must match; None without one."""
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    depth, begin = 0, start + len("\\boxed{")
    for i in range(begin - 1, len(text)):
        depth += {"{": 1, "}": -1}.get(text[i], 0)
        if depth == 0:
            return text[begin:i]
    return None


def reference_answer(text: str) -> str:
    """The answer of a reference: what is boxed in it or stands after its last ####, else all of it."""
    found = boxed(text)
    return (text.rpartition("####")[2] if found is None else found).strip()


def same_answer(given: str, reference: str) -> bool:
    """Whether two short answers are the same number, or read the same."""
    a, b = _normal(given), _normal(reference)
    x, y = _number(a), _number(b)
    return a == b if x is None or y is None else x == y


def _normal(text: str) -> str:
    text = text.replace("\\dfrac", "\\frac").replace("\\tfrac", "\\frac")
    return _DROPPED.sub("", text.strip()).lower()


def _number(text: str) -> Fraction | None:
    if found := _FRACTION.fullmatch(text):
        sign, above, below = found.groups()
        text = f"{sign}{above}/{below}" if not (sign and above.startswith("-")) else f"{above[1:]}/{below}"
    try:
        return Fraction(re.sub(r"(?<=\d),(?=\d{3})", "", text))
    except (ValueError, ZeroDivisionError):
        return None


def accuracy_reward(completions: Sequence[Any], answer: Sequence[str], **columns: Any) -> list[float]:
    """1 where the boxed answer is the reference's, else 0; in TRL's form."""
    found = (boxed(_text(completion)) for completion in completions)
    return [float(a is not None and same_answer(a, b)) for a, b in zip(found, answer, strict=True)]


def format_reward(completions: Sequence[Any], **columns: Any) -> list[float]:
    """1 where there is a boxed answer, else 0; in TRL's form."""
    return [float(boxed(_text(completion)) is not None) for completion in completions]


def _text(completion: Any) -> str:
    return completion if isinstance(completion, str) else "".join(turn["content"] for turn in completion)


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: str,
    extra_info: Any = None,
    accuracy: float = 1.0,
    format: float = 0.0,
    **others: Any,
) -> dict[str, float]:
    """Both rewards of one response in verl's form: `score`, their sum with the weights, and the two."""
    parts = {
        "accuracy": accuracy_reward([solution_str], [ground_truth])[0],
        "format": format_reward([solution_str])[0],
    }
    return {"score": accuracy * parts["accuracy"] + format * parts["format"], **parts}
