"""CISPO: clip the importance weight, keep every token's gradient."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ..core.kinds import Clip
from ..core.params import param
from ..core.registry import register
from ..core.terms import PolicyTerms, masked, masked_mean


@register("clip", "cispo")
@dataclass
class CISPO(Clip):
    """REINFORCE with a clipped, detached importance weight: no token's gradient is dropped, only its weight bounded.

    L = -sg(clip(r, 1 - eps_low, 1 + eps_high)) A logp_new        (verl)
    L = -sg(min(r, ratio_high)) A logp_new                        with `ratio_high` given (TRL's `epsilon_high`)

    Reads ratio and advantages [B,T]; returns the token loss [B,T]. The paper leaves the lower bound out (eps_low >= 1
    here) and does not state its upper one.
    """

    paper = "MiniMax-M1: Scaling Test-Time Compute Efficiently with Lightning Attention, arXiv 2506.13585"

    eps_low: float = param(0.2, ge=0, doc="the weight is at least 1 - eps_low; verl's 0.2")
    eps_high: float = param(0.2, ge=0, doc="the weight is at most 1 + eps_high; verl's 0.2")
    ratio_high: float | None = param(None, gt=0, doc="absolute cap, instead of both bounds; TRL (5.0 recommended)")

    def __call__(self, terms: PolicyTerms) -> Any:
        ratio = terms.ratio.detach()
        if self.ratio_high is None:
            weight = ratio.clamp(1 - self.eps_low, 1 + self.eps_high)
        else:
            weight = ratio.clamp(max=self.ratio_high)
        loss = -weight * terms.advantages * masked(terms.logp_new, terms.mask)
        return loss, {"clipped": masked_mean(torch.ne(weight, ratio).to(ratio.dtype), terms.mask)}
