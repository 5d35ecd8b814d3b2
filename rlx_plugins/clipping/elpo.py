"""ELPO's clip: from the first irrecoverable step on, a failed rollout may be pushed down further."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ..core.batch import RolloutBatch
from ..core.kinds import Clip
from ..core.params import param
from ..core.registry import register
from ..core.terms import PolicyTerms, clip_fraction, clipped_surrogate, masked_mean


@register("clip", "elpo")
@dataclass
class ELPOClip(Clip):
    """Widens the lower clip bound on the tokens of a failed rollout's critical step and all after it, which are known
    to be wrong; other tokens have PPO's asymmetric range.

    critical_t = failed and turn_ids_t >= critical_turn >= 0;   el = min(1, eps_low + extra critical_t);
    L = max(-A r, -A clip(r, 1 - el, 1 + eps_high)).

    Reads ratio, advantages, turn_ids [B,T], rewards [B] and critical_turn [B], the turn of the first irrecoverable step
    (-1 or NaN: none was found), which `allocator: elpo` finds by resampling. Returns the token loss [B,T].

    Reconstructed: that only the lower bound moves, and only in failed rollouts. There is no dual clip in the paper.
    """

    paper = (
        "Learning from the Irrecoverable: Error-Localized Policy Optimization for Tool-Integrated LLM Reasoning,"
        " arXiv 2602.09598"
    )
    requires = frozenset({"critical_turn", "turn_ids"})
    fixes = {"ratio": "token"}

    eps_low: float = param(0.2, ge=0, lt=1, doc="the range starts at 1 - eps_low; the paper's 0.2")
    eps_high: float = param(0.315, ge=0, doc="the range ends at 1 + eps_high; the paper's 0.315")
    extra: float = param(0.115, ge=0, doc="added to eps_low on critical tokens, up to 1; the paper's 0.115")
    success_threshold: float = param(0.5, doc="a rollout succeeded if its reward is above it")

    def __call__(self, terms: PolicyTerms) -> Any:
        critical = self.critical(terms.batch)
        low, high = 1 - (self.eps_low + self.extra * critical.to(terms.ratio.dtype)).clamp(max=1), 1 + self.eps_high
        loss = clipped_surrogate(terms.ratio, terms.advantages, low, high)
        return loss, {
            "clipped": clip_fraction(terms.ratio, terms.advantages, low, high, terms.mask),
            "critical": masked_mean(critical.to(loss.dtype), terms.mask),
        }

    def critical(self, batch: RolloutBatch) -> Tensor:
        """[B,T] bool: tokens of the critical step of a failed rollout and after it."""
        turn, step = batch.turn_ids, batch.critical_turn[:, None]
        failed = (batch.rewards <= self.success_threshold)[:, None]
        return failed & (turn >= 0) & (step >= 0) & (turn >= step)
