"""VESPO: a smooth sequence-level weight in place of clip and length normalisation."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch

from ..core.kinds import Clip
from ..core.params import param
from ..core.registry import register
from ..core.terms import PolicyTerms, masked, masked_mean

LOG_WEIGHT_MIN, LOG_WEIGHT_MAX = math.log(1e-8), 20.0
"""Bounds of a row's log weight, nats."""


@register("clip", "vespo")
@dataclass
class VESPO(Clip):
    """A rollout's whole likelihood ratio w, not normalised by its length, becomes a weight that is 1 at w = 1 and falls
    off smoothly far from it. Every token follows the policy gradient times that weight.

    u = clamp(sum_t clamp(d, +-20), log 1e-8, 20),  d = logp_new - logp_denominator,  w = exp(u)
    phi = exp(lambda + k u - lambda w), (k, lambda) by the sign of A, where 0 counts as positive
    L = -sg(phi) A logp_new

    Reads advantages [B,T]; returns the token loss [B,T]. TRL adds the log-weights of vLLM's mismatch to u instead of
    multiplying the loss: that is `denominator="logp_rollout"` without a correction. TRL's `loss_type="vespo"`.
    """

    paper = (
        "VESPO: Variational Sequence-Level Soft Policy Optimization for Stable Off-Policy LLM Training,"
        " arXiv 2602.10693"
    )
    fixes = {"ratio": None}
    needs_full_rows = True

    k_pos: float = param(2.0, ge=0, doc="exponent of w for A >= 0; 2")
    lambda_pos: float = param(3.0, gt=0, doc="decay in w for A >= 0; 3")
    k_neg: float = param(3.0, ge=0, doc="exponent of w for A < 0; 3")
    lambda_neg: float = param(2.0, gt=0, doc="decay in w for A < 0; 2")
    denominator: Literal["logp_old", "logp_behavior", "logp_rollout"] = param("logp_old", doc="policy divided by")

    @property
    def requires(self) -> frozenset[str]:
        return frozenset({self.denominator})

    def __call__(self, terms: PolicyTerms) -> Any:
        adv, mask = terms.advantages, terms.mask
        d = terms.log_ratio(self.denominator, clamp=20.0).detach()
        u = d.sum(1, keepdim=True).clamp(LOG_WEIGHT_MIN, LOG_WEIGHT_MAX)
        k = torch.where(adv >= 0, torch.full_like(d, self.k_pos), torch.full_like(d, self.k_neg))
        decay = torch.where(adv >= 0, torch.full_like(d, self.lambda_pos), torch.full_like(d, self.lambda_neg))
        phi = (decay + k * u - decay * u.exp()).exp()
        return -phi * adv * masked(terms.logp_new, mask), {"weight": masked_mean(phi, mask)}
