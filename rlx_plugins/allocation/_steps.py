"""Where the steps of a rollout begin, and how uncertain the policy is there."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ..core.trajectory import Rollout


def from_model(rollout: Rollout) -> list[bool]:
    """For each response token, whether the model wrote it."""
    return [s.from_model for s in rollout.segments for _ in s.tokens]


def starts_after_tools(rollout: Rollout) -> list[int]:
    """Positions of the model tokens that follow tool output."""
    tool = [s.source == "tool" for s in rollout.segments for _ in s.tokens]
    return [i for i, own in enumerate(from_model(rollout)) if own and i > 0 and tool[i - 1]]


def starts_after_tokens(rollout: Rollout, boundary: Sequence[int]) -> list[int]:
    """Positions of the model tokens that follow one of the `boundary` tokens."""
    tokens, ends = rollout.tokens, set(boundary)
    return [i for i, own in enumerate(from_model(rollout)) if own and i > 0 and tokens[i - 1] in ends]


def first_own(rollout: Rollout) -> int | None:
    """Position of the first token the model wrote; None without any."""
    return next((i for i, own in enumerate(from_model(rollout)) if own), None)


def entropy_from(rollout: Rollout, entropy: Sequence[float], at: int | None, n: int, *, mean: bool = False) -> float:
    """Sum or mean (nats) of the entropies of up to `n` model tokens from `at` on, until another's; NaN without any."""
    if at is None:
        return math.nan
    own = from_model(rollout)
    end = next((i for i in range(at, len(own)) if not own[i]), len(own))
    values = entropy[at : min(end, at + n)]
    if not values:
        return math.nan
    return sum(values) / len(values) if mean else sum(values)
