"""A task without a held-out measure: digits are rewarded."""

from __future__ import annotations

from datasets import Dataset


def digits(completions: list[str], **columns: object) -> list[float]:
    """Share of digits in the completion."""
    return [sum(c.isdigit() for c in text) / max(len(text), 1) for text in completions]


def task() -> dict[str, object]:
    """Prompts of different lengths."""
    return {"train": Dataset.from_dict({"prompt": [f"{i}+{i * i}=" for i in range(24)]}), "rewards": {"digits": digits}}
