"""The log-ratio between the trainer's policy and the one the engine sampled from."""

from __future__ import annotations

import torch
from torch import Tensor

from ..core.batch import RolloutBatch
from ..core.terms import masked


def mismatch(batch: RolloutBatch) -> tuple[Tensor, Tensor]:
    """(d, known), [B,T] each: d = logp_old - logp_rollout, at least float32.

    `known` is True on model tokens where d is finite; elsewhere d is exactly 0, so that a token the engine could not
    score (NaN) has ratio 1.
    """
    ours, theirs = batch.logp_old.detach(), batch.logp_rollout.detach()
    wide = torch.promote_types(torch.promote_types(ours.dtype, theirs.dtype), torch.float32)
    d = ours.to(wide) - theirs.to(wide)
    known = batch.response_mask & (d.abs() < torch.inf)  # isfinite takes twice as long
    return masked(d, known), known
