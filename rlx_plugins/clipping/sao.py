"""SAO's clip: a direct ratio to the engine's probabilities, and a wide band outside of which a token is dropped."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from ..core.kinds import Clip
from ..core.params import param
from ..core.registry import register
from ..core.terms import PolicyTerms, masked, masked_mean


class Band(NamedTuple):
    """log_ratio [B,T], and per token [B,T] bool: kept, below the band, above it, without a finite number."""

    log_ratio: Tensor
    keep: Tensor
    low: Tensor
    high: Tensor
    unknown: Tensor


@register("clip", "sao")
@dataclass
class SAOClip(Clip):
    """REINFORCE weighted by the direct ratio of the training policy to what the engine reported, without a recomputed
    old policy; tokens whose ratio leaves the band carry no gradient, whatever the sign of their advantage.

    d = logp_new - logp_rollout;   keep: log(1 - eps_low) < d < log(1 + eps_high), strictly;
    L = -sg(exp(d)) A logp_new where kept, 0 elsewhere: d L / d logp_new = -exp(d) A.

    Reads logp_new, the denominator's log-probs and advantages [B,T]; returns the token loss [B,T] and the metrics
    reject_low, reject_high and unknown, shares of the model tokens. A token with a log-prob or advantage that is not
    finite is rejected (unknown), not given weight 1 as elsewhere: there is no other policy to stand in. Rejected tokens
    stay in the aggregate's count. It makes its own ratio; corrections of the same mismatch are refused. With
    eps_low >= 1 there is no lower bound.

    The defaults are the paper's for tool-integrated reasoning; its coding agent took 0.8 and 3.0. Reconstructed: the
    strict bounds and what happens to numbers that are not finite.
    """

    paper = "SAO, arXiv 2607.07508"
    fixes = {"ratio": None}

    eps_low: float = param(0.3, ge=0, doc="the band starts at 1 - eps_low; the paper's 0.3")
    eps_high: float = param(5.0, ge=0, doc="the band ends at 1 + eps_high; the paper's 5.0")
    denominator: Literal["logp_rollout", "logp_old"] = param(
        "logp_rollout", doc="policy divided by; logp_old where the host keeps the engine's log-probs there"
    )

    @property
    def requires(self) -> frozenset[str]:
        return frozenset({self.denominator})

    def __call__(self, terms: PolicyTerms) -> Any:
        band = self.band(terms)
        weight = masked(band.log_ratio, band.keep).exp()
        loss = -weight * masked(terms.advantages, band.keep) * masked(terms.logp_new, band.keep)
        shares = {"reject_low": band.low, "reject_high": band.high, "unknown": band.unknown}
        return loss, {name: masked_mean(where.to(loss.dtype), terms.mask) for name, where in shares.items()}

    def band(self, terms: PolicyTerms) -> Band:
        """Which tokens the band keeps, and why it rejects the others."""
        reference = terms.batch[self.denominator].to(terms.logp_new.dtype)
        d = terms.logp_new.detach() - reference
        finite = torch.isfinite(terms.logp_new) & torch.isfinite(reference)
        known = terms.mask & finite & torch.isfinite(terms.advantages)
        lowest = math.log(1 - self.eps_low) if self.eps_low < 1 else -math.inf
        low, high = known & (d <= lowest), known & (d >= math.log(1 + self.eps_high))
        return Band(d, known & ~low & ~high, low, high, terms.mask & ~known)
