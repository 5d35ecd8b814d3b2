"""How much each turn raised the policy's own probability of the gold answer."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from ..core.operations import Forward, Steps
from ..core.trajectory import Rollout, Segment


def information_gain(rollouts: Sequence[Rollout], answers: Sequence[Sequence[int]]) -> Steps:
    """IG_t = p_t - p_(t-1) of every model turn but the last, one list per rollout (one `Forward` for all of them).

    p_t = exp(mean log-prob of the answer's tokens after the dialogue up to and including turn t's tool result), p_(-1)
    that after the prompt alone. NaN where the prompt has no answer.
    """
    probes, owners = [], []
    for i, (rollout, answer) in enumerate(zip(rollouts, answers, strict=True)):
        ends = turn_ends(rollout)
        if answer and ends:
            probes += [_asked(rollout, cut, answer) for cut in (0, *ends)]
            owners += [i] * (len(ends) + 1)
    logps = (yield Forward(probes, "logp")) if probes else []
    found: list[list[float]] = [[] for _ in rollouts]
    for i, logp in zip(owners, logps, strict=True):
        scored = logp[-len(answers[i]) :]
        found[i].append(math.exp(sum(scored) / len(scored)))
    return [
        [after - before for before, after in zip(p, p[1:])] if p else [math.nan] * len(turn_ends(rollout))
        for rollout, p in zip(rollouts, found, strict=True)
    ]


def turn_ends(rollout: Rollout) -> list[int]:
    """Number of segments up to and including the tool result of each model turn but the last."""
    ends, turn = [], None
    for k, segment in enumerate(rollout.segments):
        if not segment.from_model or not segment.tokens:
            continue
        if turn is not None and segment.turn != turn:
            ends.append(k)
        turn = segment.turn
    return ends


def _asked(rollout: Rollout, cut: int, answer: Sequence[int]) -> Rollout:
    """The rollout's first `cut` segments with the answer after them, for scoring."""
    segments = [dataclasses.replace(s) for s in rollout.segments[:cut]]
    return dataclasses.replace(rollout, segments=[*segments, Segment(list(answer))], extras={})
