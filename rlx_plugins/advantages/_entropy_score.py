"""HAPO's entropy score of a token, and the clip range that follows it."""

from __future__ import annotations

import torch
from torch import Tensor

from ..clipping._order import kth_smallest
from ..core.segments import wide
from ..core.terms import masked

LEAST_ENTROPY = 1e-8
"""Entropies are taken to be at least this many nats before the logarithm; released code."""


def entropy_score(entropy: Tensor, mask: Tensor, quantile: float, signed: bool = True) -> Tensor:
    """h [B,T] in [-1, 1]: how far a token's log-entropy lies from the `quantile` of the tokens of `mask`.

    d = log max(H, 1e-8) - m with m the quantile by nearest rank; h = d / max d above it, d / |min d| below; 0 at the
    quantile, where masked, where the entropy is not finite, and where all entropies are equal. `signed=False` divides
    the lower side by min d itself, so that h >= 0. Detached; the device is not waited for.
    """
    entropy = wide(entropy.detach())
    live = mask & torch.isfinite(entropy)
    x = masked(entropy, live).clamp(min=LEAST_ENTROPY).log()
    last = (live.sum() - 1).clamp(min=0)
    rank = (quantile * last.to(torch.float64)).round().long()  # half to even
    d = masked(x - kth_smallest(torch.where(live, x, torch.inf), rank + 1), live)
    up, down = d.max(), d.min()
    above = d / torch.where(up > 0, up, torch.ones_like(up))
    below = d / torch.where(down < 0, -down, torch.ones_like(down))
    return torch.where(d > 0, above, below if signed else -below)


def adaptive_range(score: Tensor, eps_low: float, eps_high: float, alpha: float) -> tuple[Tensor, Tensor]:
    """(el, eh) [B,T], distances from 1: eps_low grows with certainty (h < 0), eps_high with uncertainty (h > 0)."""
    return eps_low * (1 + alpha * (-score).clamp(min=0)), eps_high * (1 + alpha * score.clamp(min=0))
