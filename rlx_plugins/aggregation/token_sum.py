"""Sum over all tokens of the optimizer step."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..core.batch import RolloutBatch
from ..core.kinds import Aggregate, Columns
from ..core.registry import register


@register("aggregate", "token_sum")
@dataclass
class TokenSum(Aggregate):
    """The token losses are summed and divided by nothing, so the size of the update grows with the tokens of the step.

    weight = mask [B,T], count = 0 per row [B]: a total of 0 leaves the sum undivided (`reduce` in core/objective.py).
    verl's `token-sum`.
    """

    def __call__(self, batch: RolloutBatch, mask: Tensor) -> Columns:
        weight = mask.to(batch.dtype)
        return {"weight": weight, "count": torch.zeros(len(mask), dtype=weight.dtype, device=mask.device)}
