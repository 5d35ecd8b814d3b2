"""CoPRIS's cross-stage log-probs: each token of a rollout that spans updates keeps those of its own policy."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..core.context import Context
from ..core.kinds import Pruner
from ..core.operations import Forward, Steps
from ..core.registry import register
from ..core.trajectory import Group, Rollout


@register("pruner", "copris_is")
@dataclass
class CoprisIS(Pruner):
    """When generation ends, before the weights change, every rollout that goes on in a later step is scored with the
    trainer's policy, and each token that has no log-prob yet keeps the one it gets: old log-probs that fit the policy
    of the stage in which the token was written, in the trainer's arithmetic.

    old[h : len_s] = logp_s[h : len_s] for every stage s in order, h the length so far: stored positions are never
    written again. They become `logp_behavior`, NaN on tokens of the last stage, for which the step's logp_old stands.

    Wants a pruner that parks rollouts behind it in the chain (`pruner: [copris_is, april]`) and a ratio over
    logp_behavior; `method: copris_is` sets that up. One forward pass per step over what is left. The mismatch between
    engine and trainer is not corrected: that is for a correction.
    """

    paper = "CoPRIS: concurrency-controlled partial rollout with importance sampling, arXiv 2511.05589"
    provides = frozenset({"logp_behavior"})
    capabilities = frozenset({"forward:logp"})

    def close(self, left: list[Group], ctx: Context) -> Steps:
        going_on = [r for g in left for r in g.rollouts if r.state != "pruned" and unscored(r)]
        ctx.log("pruner/copris_is_scored", len(going_on))
        if not going_on:
            return
        logps = yield Forward(going_on, "logp")
        for r, logp in zip(going_on, logps, strict=True):
            record_stage(r, logp)


def unscored(rollout: Rollout) -> bool:
    """Whether a token of the model has no log-prob of the stage that wrote it."""
    return any(
        s.from_model and (s.logp_behavior is None or any(math.isnan(x) for x in s.logp_behavior))
        for s in rollout.segments
        if s.tokens
    )


def record_stage(rollout: Rollout, logp: list[float]) -> None:
    """Keep `logp`, one number per response token, where no stage has left one yet."""
    at = 0
    for s in rollout.segments:
        end = at + len(s.tokens)
        if s.from_model:
            known = s.logp_behavior or []
            known = known + [math.nan] * (len(s.tokens) - len(known))
            s.logp_behavior = [new if math.isnan(old) else old for old, new in zip(known, logp[at:end], strict=True)]
        at = end
