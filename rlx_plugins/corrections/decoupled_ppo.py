"""Decoupled PPO: the policy of the trust region and the one that sampled are two, and their ratio weighs each token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ..core.batch import RolloutBatch
from ..core.kinds import Columns, Correction
from ..core.params import param
from ..core.registry import register
from ..core.terms import masked, masked_mean
from ._mismatch import mismatch

WEIGHT_CLAMP = 60.0
"""Bound on the weight's exponent in nats: float32 holds e^60 times a ratio of e^20."""

CapMode = Literal["mask", "truncate"]


@register("correction", "decoupled_ppo")
@dataclass
class DecoupledPPO(Correction):
    """In asynchronous training the rollouts come from older weights than those the update starts from. PPO clips
    against the policy at the start of the step, the proximal one, and a weight undoes the bias of the sampling.

    weight = exp(logp_old - logp_rollout), logp_old being the proximal policy's;  above `cap`: 0 (mask), cap (truncate).

    Reads logp_old, logp_rollout, response_mask [B,T]; returns weight [B,T], 0 where masked, at least float32, and the
    share `capped` (a number). Where the difference is not finite the weight is 1. Tokens without weight stay in the
    loss's denominator. Inside the clip range weight and ratio multiply to the whole ratio of the current policy over
    the one that sampled.

    AReaL applies no weight where its `rejection_sampling` block is absent; `cap: null` is the uncapped weight. The
    exponent is bounded by 60 nats. `method: decoupled_ppo` adds ratio and clip, or does without logp_old.
    """

    paper = "AReaL: A Large-Scale Asynchronous Reinforcement Learning System for Language Reasoning, arXiv 2505.24298"
    requires = frozenset({"logp_old", "logp_rollout"})

    cap: float | None = param(None, gt=0, doc="largest weight; AReaL's legacy default 5; None: no bound")
    cap_mode: CapMode = param("mask", doc="a token above the cap: weight 0 (AReaL's mask), or the cap (its clamp)")

    def __call__(self, batch: RolloutBatch) -> Columns:
        mask = batch.response_mask
        raw = mismatch(batch)[0].clamp(-WEIGHT_CLAMP, WEIGHT_CLAMP).exp()
        weight = masked(capped(raw, self.cap, self.cap_mode), mask)
        over = torch.zeros_like(raw) if self.cap is None else (raw > self.cap).to(raw.dtype)
        return {"weight": weight, "capped": masked_mean(over, mask)}


def capped(weight: Tensor, cap: float | None, mode: CapMode) -> Tensor:
    """Weights above `cap` set to 0 (mask) or to it (truncate)."""
    if cap is None:
        return weight
    return masked(weight, weight <= cap) if mode == "mask" else weight.clamp(max=cap)
