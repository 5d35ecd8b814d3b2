"""DRO: the policy gradient with a quadratic penalty on the log ratio."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from ..core.kinds import Clip
from ..core.params import param
from ..core.registry import register
from ..core.terms import PolicyTerms, masked


@register("clip", "dro")
@dataclass
class DRO(Clip):
    """The policy gradient, held near the old policy by the square of the log ratio instead of a clip.

    L = -(A logp_new - penalty_coef / 2 d^2),  d = logp_new - logp_denominator

    Reads advantages [B,T]; returns the token loss [B,T]. verl's `dro`, whose `dro_beta` has no default either. The
    penalty acts where A = 0 too.
    """

    paper = "Offline Regularised Reinforcement Learning for Large Language Models Alignment, arXiv 2405.19107"
    fixes = {"ratio": None}

    penalty_coef: float = param(gt=0, doc="weight of the squared log ratio; verl's `dro_beta`, to be chosen")
    denominator: Literal["logp_old", "logp_behavior", "logp_rollout"] = param("logp_old", doc="policy divided by")

    @property
    def requires(self) -> frozenset[str]:
        return frozenset({self.denominator})

    def __call__(self, terms: PolicyTerms) -> Tensor:
        d = terms.log_ratio(self.denominator)
        return self.penalty_coef / 2 * d.square() - terms.advantages * masked(terms.logp_new, terms.mask)
