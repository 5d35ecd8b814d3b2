"""Truncated importance weights for the mismatch between the sampling engine and the trainer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from ..core.batch import RolloutBatch
from ..core.errors import ConfigError
from ..core.kinds import Columns, Correction
from ..core.params import param
from ..core.registry import register
from ..core.terms import masked, masked_mean
from ._mismatch import mismatch

SMALLEST_MEAN = 1e-8
"""A mean weight at or below this is not divided by."""


class Truncated(NamedTuple):
    """weight and raw (before truncation) [B,T], 0 outside `live` [B,T]: the tokens that count."""

    weight: Tensor
    raw: Tensor
    live: Tensor

    def effective_sample_size(self) -> Tensor:
        """(sum w)^2 / (n sum w^2) over the live tokens, in (0, 1]; 1 without any."""
        squares = self.live.sum() * self.weight.square().sum()
        return torch.where(squares > 0, self.weight.sum().square() / squares.clamp(min=1e-30), torch.ones_like(squares))


@register("correction", "tis")
@dataclass
class TIS(Correction):
    """The loss of a token is multiplied by pi_old / pi_rollout, the trainer's probability over the engine's, truncated
    from above: a little bias for a bounded variance.

    d = logp_old - logp_rollout; the log-weight is d (token), its sum over the row (sequence), or its mean (geometric);
    weight = clamp(exp(clamp(log-weight, +-safety)), lower, upper).

    Reads logp_old, logp_rollout, response_mask [B,T]; returns weight [B,T], 0 where masked, at least float32,
    the effective sample size and the share of truncated tokens (numbers). A token
    the engine could not score counts as d = 0 (`nan_policy="one"`), or gets weight 0 and leaves its row's sum and mean
    ("drop"); the loss's denominator is unchanged either way.

    verl (`rollout_is`) and TRL (`vllm_importance_sampling_mode=*_truncate`) have the token and sequence weights; the
    geometric weight, a lower clamp beside truncation (verl), "drop" and normalisation (TRL) are new here.
    """

    paper = "FP8-RL: a practical and stable low-precision stack for LLM RL, arXiv 2601.18150"
    requires = frozenset({"logp_old", "logp_rollout"})
    scope = "batch"

    level: Literal["token", "sequence", "geometric"] = param("token", doc="the paper's token")
    upper: float = param(2.0, gt=0, doc="largest weight; verl's 2.0 (TRL 3.0); geometric needs about 1.05")
    lower: float | None = param(None, ge=0, doc="smallest weight; None: no bound")
    nan_policy: Literal["one", "drop"] = param("one", doc="a token without an engine log-prob: weight 1 (TRL) or 0")
    batch_normalize: bool = param(False, doc="divide by the mean weight of the batch, after truncation")
    safety: float = param(20.0, gt=0, doc="bound on |log-weight| before exp; verl's 20")

    def check(self) -> None:
        if self.lower is not None and self.lower > self.upper:
            raise ConfigError(f"correction tis.lower: must be <= upper ({self.upper:g}), got {self.lower:g}")

    def __call__(self, batch: RolloutBatch) -> Columns:
        found = self.truncate(batch)
        return {
            "weight": found.weight,
            "effective_sample_size": found.effective_sample_size(),
            "truncated": (found.raw > self.upper).sum(dtype=found.raw.dtype)
            / found.live.sum().clamp(min=1),  # raw is 0 outside live
        }

    def truncate(self, batch: RolloutBatch) -> Truncated:
        """The weights, with what they were before truncation."""
        d, known = mismatch(batch)
        live = batch.response_mask if self.nan_policy == "one" else known
        if self.level == "sequence":
            d = d.sum(1, keepdim=True).expand_as(d)
        elif self.level == "geometric":
            d = masked_mean(d, live, 1)[:, None].expand_as(d)
        raw = masked(d.clamp(-self.safety, self.safety).exp(), live)
        weight = masked(raw.clamp(min=self.lower, max=self.upper), live)
        return Truncated(self.normalized(weight, live) if self.batch_normalize else weight, raw, live)

    def normalized(self, weight: Tensor, live: Tensor) -> Tensor:
        """Weights of mean 1: over tokens at token level, else over the rows that have any."""
        if self.level == "token":
            mean = masked_mean(weight, live)
        else:
            mean = masked_mean(masked_mean(weight, live, 1), live.any(1))
        return torch.where(mean > SMALLEST_MEAN, weight / mean, weight)
