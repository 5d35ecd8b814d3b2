"""PPO's clipped surrogate, with an upper bound of its own (clip-higher) and an optional dual clip."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..core.kinds import Clip
from ..core.params import param
from ..core.registry import register
from ..core.terms import PolicyTerms, clip_fraction, clipped_surrogate


@register("clip", "ppo")
@dataclass
class PPO(Clip):
    """The pessimistic minimum of the plain and the clipped surrogate: a token stops pushing once
    its ratio has left the range.

    L = max(-A r, -A clip(r, 1 - eps_low, 1 + eps_high)); for A < 0 with a dual clip c additionally L <= -A c.

    Reads ratio and advantages [B,T]; returns the token loss [B,T]. Asymmetric bounds (0.2 / 0.28) are DAPO's
    clip-higher (arXiv 2503.14476); the dual clip is arXiv 1912.09729 (verl's `clip_ratio_c`, always 3.0 there).
    """

    paper = "Proximal Policy Optimization Algorithms, arXiv 1707.06347"

    eps_low: float = param(0.2, ge=0, doc="the range starts at 1 - eps_low; both hosts' 0.2")
    eps_high: float = param(0.2, ge=0, doc="the range ends at 1 + eps_high; both hosts' 0.2")
    dual_clip: float | None = param(None, gt=1, doc="bound for negative advantages; verl's 3.0; None: off (TRL)")

    def __call__(self, terms: PolicyTerms) -> Any:
        low, high = 1 - self.eps_low, 1 + self.eps_high
        loss = clipped_surrogate(terms.ratio, terms.advantages, low, high, self.dual_clip)
        return loss, {"clipped": clip_fraction(terms.ratio, terms.advantages, low, high, terms.mask)}
