"""What Clip-Cov and KL-Cov share: the covariance of advantage and log-probability, and how many tokens to pick."""

from __future__ import annotations

import torch
from torch import Tensor

from ..core.terms import PolicyTerms, masked, masked_mean


def token_covariance(terms: PolicyTerms) -> Tensor:
    """(A - mean A)(logp_new - mean logp_new) [B,T], means over the micro-batch's tokens; 0 where masked. Detached."""
    mask = terms.mask
    adv, logp = masked(terms.advantages, mask), masked(terms.logp_new.detach(), mask)
    cov = (adv - masked_mean(adv, mask)) * (logp - masked_mean(logp, mask))
    return masked(cov, mask)


def share_of(tokens: Tensor, share: float) -> Tensor:
    """max(1, floor(share * tokens)) as a tensor, without waiting for the device."""
    return (tokens.to(torch.float64) * share).floor().clamp(min=1)
