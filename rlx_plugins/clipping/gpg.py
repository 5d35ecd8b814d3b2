"""GPG: the plain policy gradient, no ratio and no clip."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ..core.kinds import Clip
from ..core.registry import register
from ..core.terms import PolicyTerms, masked


@register("clip", "gpg")
@dataclass
class GPG(Clip):
    """REINFORCE on the group's advantages, as if every batch were on policy.

    L = -A logp_new. Reads advantages [B,T]; returns the token loss [B,T]. verl's `gpg`.
    """

    paper = "GPG: A Simple and Strong Reinforcement Learning Baseline for Model Reasoning, arXiv 2504.02546"
    fixes = {"ratio": None}

    def __call__(self, terms: PolicyTerms) -> Tensor:
        return -terms.advantages * masked(terms.logp_new, terms.mask)
