"""What the divergence masks share: the reference's log-probs, two-outcome divergences, the masked policy gradient."""

from __future__ import annotations

import dataclasses
from typing import Literal

import torch
from torch import Tensor

from ..core.terms import PolicyTerms, masked

Divergence = Literal["tv", "kl"]

TINY = 1e-8
"""Added to both probabilities of "any other token" in the two-outcome KL; verl's 1e-8."""


def reference_logp(terms: PolicyTerms, denominator: str) -> Tensor:
    """The denominator's log-probabilities [B,T], logp_old where it is unknown, 0 where masked; detached."""
    nothing = dataclasses.replace(terms, logp_new=torch.zeros_like(terms.logp_new.detach()))
    return -nothing.log_ratio(denominator)


def binary_divergence(logp: Tensor, reference: Tensor, kind: Divergence) -> Tensor:
    """Divergence between the reference's distribution over {this token, any other} and the policy's, elementwise.

    tv: |p - q|;  kl: q log(q/p) + (1 - q) log((1 - q + 1e-8) / (1 - p + 1e-8))   with p, q the token's probabilities.
    """
    p, q = logp.exp(), reference.exp()
    if kind == "tv":
        return (p - q).abs()
    drawn = masked(q * (reference - logp), q > 0)
    return drawn + (1 - q) * ((1 - q + TINY) / (1 - p + TINY)).log()


def masked_policy_gradient(terms: PolicyTerms, weight: Tensor, keep: Tensor) -> Tensor:
    """-A weight logp_new [B,T] where `keep`, exactly 0 elsewhere; only logp_new carries gradient.

    A token that has become impossible (logp_new -inf) has neither loss nor gradient.
    """
    live = terms.mask & keep & torch.isfinite(terms.logp_new)
    return masked(-terms.advantages * weight, live) * masked(terms.logp_new, live)
