"""GMPO: the geometric mean of a rollout's clipped token ratios."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from ..core.kinds import Clip
from ..core.params import param
from ..core.registry import register
from ..core.terms import PolicyTerms, masked, masked_mean
from ..ratios._exp import exp


@register("clip", "gmpo")
@dataclass
class GMPO(Clip):
    """The rollout's objective is its advantage times the geometric mean of its token ratios, which one outlier can't
    dominate. Each token is clipped in log space before the mean.

    x_t = sgn(A) min(sgn(A) d, sgn(A) clip(d, -log_eps_low, log_eps_high)),  d = logp_new - logp_denominator
    rho = exp(mean_t x_t),  L_row = -mean_t(A) rho;  loss = mean over rows of L_row

    Every token of a row carries L_row [B,T], so that the mean within rows gives it back with its gradient. Correction
    weights enter as their geometric mean over the row. verl's `geo_mean`, which averages over all rows, those without a
    model token included: `aggregate: {name: seq_mean_token_mean, empty_rows: count}`; its clip range is 0.2.
    """

    paper = "Geometric-Mean Policy Optimization, arXiv 2507.20673"
    fixes = {"ratio": None, "aggregate": "seq_mean_token_mean"}
    needs_full_rows = True

    log_eps_low: float = param(0.4, ge=0, doc="a token's log ratio is clipped below at -log_eps_low; the paper's 0.4")
    log_eps_high: float = param(0.4, ge=0, doc="and above at log_eps_high; the paper's 0.4")
    denominator: Literal["logp_old", "logp_behavior", "logp_rollout"] = param("logp_old", doc="policy divided by")

    @property
    def requires(self) -> frozenset[str]:
        return frozenset({self.denominator})

    def __call__(self, terms: PolicyTerms) -> Any:
        mask, adv = terms.mask, terms.advantages
        sign = adv.sign()
        d = masked(terms.log_ratio(self.denominator), sign != 0)
        clipped = d.clamp(-self.log_eps_low, self.log_eps_high)
        x = sign * torch.minimum(sign * d, sign * clipped)
        rows = -masked_mean(adv, mask, dim=1) * exp(masked_mean(x, mask, dim=1))
        if terms.batch.has("correction_weight"):
            rows = rows * _geometric_over_arithmetic(terms.batch.correction_weight, mask).to(rows.dtype)
        loss = masked(rows[:, None].expand_as(mask), mask)
        return loss, {"clipped": masked_mean(torch.ne(d, clipped).to(d.dtype), mask)}


def _geometric_over_arithmetic(weight: Tensor, mask: Tensor) -> Tensor:
    """[B]: the objective multiplies a row's loss with its mean weight; this factor makes that the geometric mean."""
    mean = masked_mean(weight, mask, dim=1)
    geometric = masked_mean((masked(weight, mask) + 1e-10).log(), mask, dim=1).exp()
    return torch.where(mean > 0, geometric / torch.where(mean > 0, mean, torch.ones_like(mean)), torch.zeros_like(mean))
