"""KL-Cov: hold the few tokens of highest covariance back with a KL penalty."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch

from ..core.kinds import Clip
from ..core.params import param
from ..core.registry import register
from ..core.terms import PolicyTerms, masked_mean
from ..ratios._exp import exp
from ._covariance import share_of, token_covariance
from ._order import first_k


@register("clip", "kl_cov")
@dataclass
class KLCov(Clip):
    """Tokens whose advantage and log-probability rise together make the entropy collapse; the strongest of them are
    pulled back to the old policy. All others follow the unclipped surrogate.

    L = -A r, and + penalty_coef |d| on the max(1, floor(penalty_share * tokens)) tokens of largest
    cov = (A - mean A)(logp_new - mean logp_new);  d = logp_new - logp_denominator, r = exp(d)

    Reads advantages [B,T]; returns the token loss [B,T]. Means and number are those of the micro-batch. verl's
    configuration sets the coefficient to 0.1 (`ppo_kl_coef`), the docstring of its function says 1.
    """

    paper = "The Entropy Mechanism of Reinforcement Learning for Reasoning Language Models, arXiv 2505.22617"
    scope = "micro"
    fixes = {"ratio": None}

    penalty_share: float = param(2e-4, gt=0, le=1, doc="share of the tokens penalised; verl's 2e-4 (`kl_cov_ratio`)")
    penalty_coef: float = param(0.1, ge=0, doc="weight of |log ratio| on them; verl's 0.1")
    denominator: Literal["logp_old", "logp_behavior", "logp_rollout"] = param("logp_old", doc="policy divided by")

    @property
    def requires(self) -> frozenset[str]:
        return frozenset({self.denominator})

    def __call__(self, terms: PolicyTerms) -> Any:
        d = terms.log_ratio(self.denominator)
        picked = first_k(-token_covariance(terms), terms.mask, share_of(terms.mask.sum(), self.penalty_share))
        loss = -terms.advantages * exp(d)
        loss = torch.where(picked, loss + self.penalty_coef * d.abs(), loss)
        return loss, {"penalised": masked_mean(picked.to(loss.dtype), terms.mask)}
