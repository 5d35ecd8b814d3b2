"""TBPO: one ratio per rollout, failures clipped on both sides, rollouts the engine saw too differently left out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..core.errors import ConfigError
from ..core.kinds import Clip
from ..core.params import param
from ..core.registry import register
from ..core.terms import PolicyTerms, masked, masked_mean

LOG_CLAMP = 20.0
"""Bound on a rollout's mean log ratio, nats."""


class Rows(NamedTuple):
    """Per rollout [B]: ratio (with gradient), mismatch weight, kept, advantage, loss, and why rows were dropped."""

    ratio: Tensor
    weight: Tensor
    keep: Tensor
    advantage: Tensor
    loss: Tensor
    outside: Tensor
    unknown: Tensor


@register("clip", "tbpo")
@dataclass
class TBPO(Clip):
    """Made for rollouts of a quantised engine, whose occasional garbled tokens give failures an unbounded ratio: every
    rollout has one ratio, a failure's is clipped on both sides, and the trainer's probability over the engine's weighs
    the rollout, or leaves it out where it is outside a band.

        s = exp(mean_t(logp_new - logp_old)),   w = sg exp(mean_t(logp_old - logp_rollout)),   keep = w in [band]
        J = min(s A, clip(s, 1 - eps_low, 1 + eps_high) A)  for A >= 0,   A clip(s, 1 - eps_low, 1 + eps_neg_high)  else
        L = -w J keep;   loss = mean over rollouts of L

    Reads logp_new, logp_old, logp_rollout and advantages [B,T] (their mean over the row counts); every token of a row
    carries its L [B,T], so that the mean within rows gives it back with its gradient. Metrics: ratio, mismatch,
    clipped, outside_band, unknown. A rollout with a token the engine has no log-prob for (NaN) is dropped; dropped ones
    stay in the count.

    The mismatch weight is part of the loss: a correction that weighs for the same pair is refused. Thresholds and the
    normalisation are reconstructions at GSPO's scale.
    """

    paper = "QaRL: rollout-aligned quantisation-aware RL, arXiv 2604.07853"
    requires = frozenset({"logp_old", "logp_rollout"})
    fixes = {"ratio": None, "aggregate": "seq_mean_token_mean"}
    needs_full_rows = True
    denominator = "logp_rollout"

    eps_low: float = param(3e-4, ge=0, doc="the range starts at 1 - eps_low; reconstructed")
    eps_high: float = param(4e-4, ge=0, doc="it ends at 1 + eps_high for A >= 0; reconstructed")
    eps_neg_high: float = param(4e-4, ge=0, doc="it ends at 1 + eps_neg_high for A < 0; reconstructed; inf: GSPO")
    band_low: float = param(0.5, ge=0, doc="smallest mismatch weight of a rollout that is used; reconstructed")
    band_high: float = param(2.0, ge=0, doc="largest mismatch weight of a rollout that is used; reconstructed")

    def check(self) -> None:
        if self.band_low > self.band_high:
            raise ConfigError(f"clip tbpo.band_low: must be <= band_high ({self.band_high:g}), got {self.band_low:g}")

    def __call__(self, terms: PolicyTerms) -> Any:
        rows, any_token = self.rows(terms), terms.mask.any(1)
        low, high = 1 - self.eps_low, 1 + self.eps_high
        ratio, dtype = rows.ratio.detach(), rows.ratio.dtype
        beyond = (ratio < low) | (ratio > 1 + self.eps_neg_high)
        clipped = torch.where(rows.advantage < 0, beyond, (rows.advantage > 0) & (ratio > high))
        return masked(rows.loss[:, None].expand_as(terms.mask), terms.mask), {
            "ratio": masked_mean(ratio, any_token),
            "mismatch": masked_mean(rows.weight, rows.keep),
            "clipped": masked_mean(clipped.to(dtype), rows.keep),
            "outside_band": masked_mean(rows.outside.to(dtype), any_token),
            "unknown": masked_mean(rows.unknown.to(dtype), any_token),
        }

    def rows(self, terms: PolicyTerms) -> Rows:
        """The quantities of every rollout of the micro-batch."""
        mask, batch = terms.mask, terms.batch
        any_token = mask.any(1)
        log_ratio = terms.log_ratio()
        log_ratio = log_ratio.to(torch.promote_types(log_ratio.dtype, torch.float32))  # the range is 3e-4 wide
        ratio = masked_mean(log_ratio, mask, 1).clamp(-LOG_CLAMP, LOG_CLAMP).exp()
        mismatch = masked(batch.logp_old.to(ratio.dtype) - batch.logp_rollout.to(ratio.dtype), mask)
        unknown = torch.isnan(mismatch).any(1)
        mean = masked_mean(masked(mismatch, ~unknown[:, None]), mask, 1)
        weight = mean.clamp(-LOG_CLAMP, LOG_CLAMP).exp().detach()
        inside = (weight >= self.band_low) & (weight <= self.band_high)
        keep = any_token & ~unknown & inside
        advantage = masked_mean(terms.advantages, mask, 1).to(ratio.dtype)
        gained = torch.minimum(ratio * advantage, ratio.clamp(1 - self.eps_low, 1 + self.eps_high) * advantage)
        lost = ratio.clamp(1 - self.eps_low, 1 + self.eps_neg_high) * advantage
        loss = masked(-weight * torch.where(advantage < 0, lost, gained), keep)
        return Rows(ratio, weight, keep, advantage, loss, any_token & ~unknown & ~inside, unknown)
