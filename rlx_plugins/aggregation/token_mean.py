"""Mean over all tokens of the optimizer step."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ..core.batch import RolloutBatch
from ..core.kinds import Aggregate, Columns
from ..core.registry import register


@register("aggregate", "token_mean")
@dataclass
class TokenMean(Aggregate):
    """Every token weighs the same, so long rollouts weigh more: sum of token losses over the number of tokens.

    weight = mask [B,T], count = tokens per row [B]. verl's `token-mean`, TRL's `loss_type="dapo"`.
    """

    paper = "DAPO: An Open-Source LLM Reinforcement Learning System at Scale, arXiv 2503.14476"

    def __call__(self, batch: RolloutBatch, mask: Tensor) -> Columns:
        weight = mask.to(batch.dtype)
        return {"weight": weight, "count": weight.sum(1)}
