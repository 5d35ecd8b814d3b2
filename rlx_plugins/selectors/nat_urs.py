"""NAT's uniform random tokens: each token is trained with probability p and then counts 1/p."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..core.batch import RolloutBatch
from ..core.kinds import Columns, Selector
from ..core.params import param
from ..core.randomness import row_uniform
from ..core.registry import register


@register("selector", "nat_urs")
@dataclass
class NATUniform(Selector):
    """Every model token is kept independently with probability p and weighs 1/p; the rest carries no loss. The expected
    gradient is that of all tokens (Horvitz-Thompson), with the full length in every denominator.

    Reads response_mask [B,T]; returns weight [B,T] in {0, 1/p}. The draw depends on seed, step, row and position in the
    row, so a rollout keeps its tokens in every pass over the batch, wherever its row lies.

    The weight applies after clipping and corrections, whose statistics still see all tokens. All tokens are still
    forwarded: restricting head and backward pass to the kept ones needs a seam that the hosts do not have.
    """

    paper = "NAT: partial-token policy gradients, arXiv 2603.06619"

    p: float = param(0.5, gt=0, le=1, doc="probability that a token is kept; the paper goes down to 0.5")

    def __call__(self, batch: RolloutBatch) -> Columns:
        mask = batch.response_mask
        keep = mask & (token_uniform(batch, "nat_urs/keep") < self.p)
        return {"weight": keep.to(batch.dtype) / self.p}


def token_uniform(batch: RolloutBatch, name: str) -> Tensor:
    """[B,T] float64 in [0, 1): `batch.uniform(name)` continued along the row, the same for any padding."""
    first = batch.uniform(name)
    if first.ndim == 2:  # given per token by a test
        return first
    start = (first * 2**53).to(torch.int64)
    position = torch.arange(batch.response_mask.shape[1], device=first.device)
    return row_uniform(start[:, None] + position, name)
