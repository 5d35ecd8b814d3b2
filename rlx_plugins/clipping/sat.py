"""SAT: the trust region of the tokens that drifted most shrinks on the side they drifted to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from ..core.kinds import Clip
from ..core.params import param
from ..core.registry import register
from ..core.terms import PolicyTerms, clip_fraction, clipped_surrogate, masked_mean
from ._order import kth_smallest

QUANTILE_SLACK = 1e-9
"""Keeps a product such as 0.28 * 25 from being rounded up to the next token."""


class TrustRegion(NamedTuple):
    """Detached: the drift quantile (scalar); gate, contraction factors and ratio bounds [B,T]."""

    q: Tensor
    gate: Tensor
    c_plus: Tensor
    c_minus: Tensor
    lower: Tensor
    upper: Tensor


@register("clip", "sat")
@dataclass
class SAT(Clip):
    """For stale batches: the drift |log ratio| of every token is compared with the micro-batch's 90th percentile q, and
    beyond it the clip radius contracts on the side of the drift, the more the larger the drift. All other tokens keep
    PPO's interval.

        d = logp_new - logp_denominator,  gate = |d| > q > 0,  psi(u) = 1 / (1 + (u/q)^hill)
        upper = 1 + eps_high psi(max(d, 0)),  lower = 1 - eps_low psi(max(-d, 0))       where the gate is open

    Reads ratio, advantages, logp_new and the denominator's log-probs [B,T]; returns the token loss [B,T] and the
    metrics q, gated, radius_low, radius_high, smallest_factor. At `level="sequence"` d is the row mean and the ratio is
    GSPO's, so whole rows are gated.

    The paper divides by the policy that generated, which is what `method: sat` sets up; `clip: sat` alone measures the
    drift from that policy and clips the ratio over the denominator chosen there. q is that of each micro-batch, as
    published, so the result depends on the micro-batch size, and rows cut short by a selector count with the tokens
    they have left. The quantile is the smallest |d| at which the empirical distribution function reaches the level.
    """

    paper = "SAT: a staleness-adaptive trust region, arXiv 2607.18722"
    scope = "micro"

    eps_low: float = param(0.2, ge=0, doc="radius below 1 of a token that is not gated; the paper's 0.2")
    eps_high: float = param(0.2, ge=0, doc="radius above 1 of a token that is not gated; the paper's 0.2")
    quantile: float = param(0.9, gt=0, le=1, doc="share of tokens never gated; the paper's 0.9; 1: plain PPO")
    hill: float = param(2.0, gt=0, doc="exponent of the Hill kernel; the paper's 2")
    level: Literal["token", "sequence"] = param("token", doc="drift of the token, or mean drift of its row (GSPO)")
    denominator: Literal["logp_rollout", "logp_old", "logp_behavior"] = param(
        "logp_rollout", doc="policy the drift is measured from; the paper's is the one that generated"
    )

    @property
    def requires(self) -> frozenset[str]:
        return frozenset({self.denominator})

    @property
    def fixes(self) -> dict[str, str]:
        return {"ratio": self.level}

    def __call__(self, terms: PolicyTerms) -> Any:
        region = self.trust_region(terms)
        mask, dtype = terms.mask, terms.ratio.dtype
        loss = clipped_surrogate(terms.ratio, terms.advantages, region.lower, region.upper)
        return loss, {
            "q": region.q,
            "gated": region.gate.sum(dtype=dtype) / mask.sum(dtype=torch.int32).clamp(min=1),
            "radius_low": masked_mean(1 - region.lower, mask),
            "radius_high": masked_mean(region.upper - 1, mask),
            "smallest_factor": torch.minimum(region.c_plus, region.c_minus).amin(),  # 1 where masked
            "clipped": clip_fraction(terms.ratio, terms.advantages, region.lower, region.upper, mask),
        }

    def trust_region(self, terms: PolicyTerms) -> TrustRegion:
        """Gate and ratio bounds of every token of the micro-batch."""
        mask = terms.mask
        d = terms.log_ratio(self.denominator).detach()
        d = d.to(torch.promote_types(d.dtype, torch.float32))
        if self.level == "sequence":
            d = torch.where(mask, masked_mean(d, mask, 1)[:, None], torch.zeros_like(d))
        drift = d.abs()
        q = self.drift_quantile(drift, mask)
        gate = mask & (drift > q) & (q > 0)
        one = torch.ones((), dtype=d.dtype, device=d.device)
        factor = torch.where(gate, self.psi(drift / torch.where(q > 0, q, one)), one)
        c_plus, c_minus = torch.where(d > 0, factor, one), torch.where(d < 0, factor, one)
        return TrustRegion(q, gate, c_plus, c_minus, 1 - self.eps_low * c_minus, 1 + self.eps_high * c_plus)

    def drift_quantile(self, drift: Tensor, mask: Tensor) -> Tensor:
        """The ceil(quantile * N)-th smallest drift of the N active tokens; 0 without any."""
        n = mask.sum()
        rank = (self.quantile * n.double() - QUANTILE_SLACK).ceil().long().clamp(min=1)
        q = kth_smallest(torch.where(mask, drift, torch.inf), rank)
        return torch.where(n > 0, q, torch.zeros_like(q))

    def psi(self, drift: Tensor) -> Tensor:
        """The Hill kernel of a drift in units of q: 1 at 0, 1/2 at 1."""
        return 1 / (1 + drift**self.hill)
