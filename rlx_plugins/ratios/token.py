"""The token-level importance ratio of PPO."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from ..core.kinds import Ratio
from ..core.params import param
from ..core.registry import register
from ..core.terms import PolicyTerms
from ._exp import exp


@register("ratio", "token")
@dataclass
class TokenRatio(Ratio):
    """Each token's probability under the current policy over that under the denominator's policy.

    r = exp(clamp(logp_new - logp_denominator, +-log_clamp)) [B,T], 1 where masked.

    verl clamps the log-ratio at 20; TRL does not (`log_clamp: null`).
    """

    paper = "Proximal Policy Optimization Algorithms, arXiv 1707.06347"

    denominator: Literal["logp_old", "logp_behavior", "logp_rollout", "logp_prox"] = param(
        "logp_old", doc="policy divided by"
    )
    log_clamp: float | None = param(20.0, gt=0, doc="bound on |log ratio| in nats; verl's 20; None: unbounded (TRL)")

    @property
    def requires(self) -> frozenset[str]:
        return frozenset({self.denominator})

    def __call__(self, terms: PolicyTerms) -> Tensor:
        return exp(terms.log_ratio(self.denominator, self.log_clamp))
