"""The two-sided clip of INTELLECT-2: PPO's clip with a cap on the ratio itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..core.kinds import Clip
from ..core.params import param
from ..core.registry import register
from ..core.terms import PolicyTerms, clip_fraction


@register("clip", "two_sided")
@dataclass
class TwoSided(Clip):
    """PPO's clipped surrogate leaves the ratio of a token of negative advantage unbounded above. Here it is capped, so
    that one token far off policy can't blow up the step.

    L = -min(min(r, delta) A, clip(r, 1 - eps_low, 1 + eps_high) A)

    Reads ratio and advantages [B,T]; returns the token loss [B,T]. With delta > 1 + eps_high this is the dual clip
    (`ppo` with `dual_clip`) written on the ratio; TRL's `delta`.
    """

    paper = (
        "INTELLECT-2: A Reasoning Model Trained Through Globally Decentralized Reinforcement Learning, arXiv 2505.07291"
    )

    eps_low: float = param(0.2, ge=0, doc="the range starts at 1 - eps_low; the paper's 0.2")
    eps_high: float = param(0.2, ge=0, doc="the range ends at 1 + eps_high; the paper's 0.2")
    delta: float = param(4.0, gt=0, doc="cap of the ratio, above 1 + eps_high; the paper's 4")

    def __call__(self, terms: PolicyTerms) -> Any:
        low, high = 1 - self.eps_low, 1 + self.eps_high
        capped = terms.ratio.clamp(max=self.delta)
        bounded = terms.ratio.clamp(low, high)
        loss = -(capped * terms.advantages).minimum(bounded * terms.advantages)
        return loss, {"clipped": clip_fraction(terms.ratio, terms.advantages, low, high, terms.mask)}
