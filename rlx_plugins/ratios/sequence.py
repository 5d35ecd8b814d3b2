"""GSPO's sequence-level importance ratio: the geometric mean of a rollout's token ratios."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ..core.kinds import Ratio
from ..core.params import param
from ..core.registry import register
from ..core.terms import PolicyTerms, masked, masked_mean
from ._exp import exp


@register("ratio", "sequence")
@dataclass
class SequenceRatio(Ratio):
    """All tokens of a rollout share one ratio, its likelihood ratio with the length normalised away, so that the clip
    keeps or drops whole rollouts. Meant for clip ranges of 3e-4 / 4e-4 and `aggregate: seq_mean_token_mean`.

    s_b = exp(mean over the row's tokens of logp_new - logp_denominator), on its every token [B,T], 1 where masked.

    gradient "token": the row's value, d s / d logp_t = s on the token itself (GSPO-token; verl, with log_max 10).
    gradient "sequence": the true gradient, d s / d logp_u = s / n_b on every token u of the row (TRL, without a bound).
    Under seq_mean_token_mean and one advantage per row the two give the same gradient.
    """

    paper = "Group Sequence Policy Optimization, arXiv 2507.18071"
    needs_full_rows = True

    gradient: Literal["token", "sequence"] = param("token", doc="who carries the gradient of a token's ratio; verl's")
    denominator: Literal["logp_old", "logp_behavior", "logp_rollout"] = param("logp_old", doc="policy divided by")
    log_max: float | None = param(10.0, gt=0, doc="upper bound on the log ratio in nats; verl's 10; None: none (TRL)")

    @property
    def requires(self) -> frozenset[str]:
        return frozenset({self.denominator})

    def __call__(self, terms: PolicyTerms) -> Tensor:
        log_s = masked_mean(terms.log_ratio(self.denominator), terms.mask, dim=1)[:, None].expand_as(terms.mask)
        if self.gradient == "token":
            finite = terms.mask & torch.isfinite(terms.logp_new)
            live = masked(terms.logp_new, finite)
            log_s = log_s.detach() + (live - live.detach())
        log_s = masked(log_s, terms.mask)
        return exp(log_s if self.log_max is None else log_s.clamp(max=self.log_max))
