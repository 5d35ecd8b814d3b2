"""Masked importance sampling: tokens or rollouts whose mismatch leaves a band carry no loss."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ..core.batch import RolloutBatch
from ..core.errors import ConfigError
from ..core.kinds import Columns, Correction
from ..core.params import param
from ..core.registry import register
from ..core.terms import masked, masked_mean
from ._mismatch import mismatch


@register("correction", "mis")
@dataclass
class MIS(Correction):
    """Where TIS caps a large importance weight, this one leaves out the token, or the whole rollout, whose weight
    pi_old / pi_rollout is outside a band; a veto leaves out a rollout with a single token that the trainer finds
    next to impossible.

    d = logp_old - logp_rollout; the log-weight is d (token), its sum over the row (sequence), or its mean (geometric);
    raw = exp(clamp(log-weight, +-safety));  inside = lower <= raw <= upper, and no token of the row has exp(d) < veto;
    weight = raw inside (use_weight), or 1 inside.

    Reads logp_old, logp_rollout, response_mask [B,T]; returns weight [B,T], at least float32, and the shares
    kept_tokens and kept_rows (numbers). `mode="zero_weight"`: what is left out stays in the loss's denominator;
    "drop_mask": response_mask is replaced too, and the denominator shrinks. Advantages are not made anew. A token the
    engine could not score has d = 0. A batch with nothing left has loss 0.

    verl has the token and sequence bands as weights (`rollout_is_threshold: lo_hi`) and as masks (`rollout_rs`, whose
    bounds are those of rollout over trainer); TRL has `token_mask` and `sequence_mask`. New here: geometric weights
    (verl masks by them only), the veto, which is ROLL's (1e-4 there), and in TRL drop_mask. The combination of veto
    and level is a reconstruction.
    """

    paper = "FP8-RL: a practical and stable low-precision stack for LLM RL, arXiv 2601.18150"
    requires = frozenset({"logp_old", "logp_rollout"})
    scope = "batch"

    level: Literal["token", "sequence", "geometric"] = param("token", doc="whose weight is judged")
    lower: float | None = param(0.5, ge=0, doc="smallest weight kept; verl's seq_is_rs 0.5; geometric: 0.999; None: 0")
    upper: float = param(2.0, gt=0, doc="largest weight kept; verl's seq_is_rs 2.0, IcePop 5.0; geometric: 1.001")
    mode: Literal["zero_weight", "drop_mask"] = param("zero_weight", doc="is what is left out part of the denominator?")
    use_weight: bool = param(True, doc="weigh what is kept; False: only mask")
    veto: float | None = param(None, ge=0, doc="smallest exp(d) of any token of a row; ROLL's 1e-4; None: no veto")
    safety: float = param(20.0, gt=0, doc="bound on |log-weight| before exp; verl's 20")

    @property
    def masks_only(self) -> bool:
        return not self.use_weight

    def check(self) -> None:
        if self.lower is not None and self.lower > self.upper:
            raise ConfigError(f"correction mis.lower: must be <= upper ({self.upper:g}), got {self.lower:g}")

    def __call__(self, batch: RolloutBatch) -> Columns:
        raw, inside = self.judge(batch)
        weight = masked(raw, inside) if self.use_weight else inside.to(raw.dtype)
        kept, there = inside.sum(1, dtype=torch.int32), batch.lengths
        columns: Columns = {
            "weight": weight,
            "kept_tokens": kept.sum(dtype=raw.dtype) / there.sum().clamp(min=1),
            "kept_rows": (kept > 0).sum(dtype=raw.dtype) / (there > 0).sum().clamp(min=1),
        }
        if self.mode == "drop_mask":
            columns["response_mask"] = inside
        return columns

    def judge(self, batch: RolloutBatch) -> tuple[Tensor, Tensor]:
        """(raw weights, which tokens are inside) [B,T]; 0 and False where masked."""
        mask = batch.response_mask
        d, _ = mismatch(batch)
        level = d
        if self.level == "sequence":
            level = d.sum(1, keepdim=True).expand_as(d)
        elif self.level == "geometric":
            level = masked_mean(d, mask, 1)[:, None].expand_as(d)
        raw = masked(level.clamp(-self.safety, self.safety).exp(), mask)
        inside = mask & (raw >= (self.lower or 0.0)) & (raw <= self.upper)
        if self.veto is not None:
            inside = inside & ~(mask & (d.exp() < self.veto)).any(1, keepdim=True)
        return raw, inside
