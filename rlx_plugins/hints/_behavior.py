"""Log-probabilities of rollouts whose sampling context is not their training prompt."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ..core.errors import DataError
from ..core.kinds import Plugin
from ..core.trajectory import Rollout, Segment


def lacks_behavior(segment: Segment) -> bool:
    """Whether these are tokens of the model whose log-probabilities under the sampling context are not recorded yet."""
    return segment.from_model and segment.logp_behavior is None


def engine_logp(part: Plugin, rollout: Rollout, remedy: str) -> list[float]:
    """What the engine reported for each response token; NaN on tokens the model did not write."""
    out: list[float] = []
    for s in rollout.segments:
        if s.from_model and s.logp is None:
            raise DataError(
                f"{part.kind} {part.name}: the engine reported no log-probabilities for a rollout of"
                f" {rollout.prompt_key!r} that was sampled with help; make it report them, or use {remedy}"
            )
        out += s.logp if s.logp is not None else [math.nan] * len(s.tokens)
    return out


def record_behavior(rollout: Rollout, logp: Sequence[float]) -> None:
    """Write log-probabilities, one per response token, into the segments that lack them."""
    at = 0
    for s in rollout.segments:
        if lacks_behavior(s):
            s.logp_behavior = list(logp[at : at + len(s.tokens)])
        at += len(s.tokens)
