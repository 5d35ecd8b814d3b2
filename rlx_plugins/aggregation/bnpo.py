"""Mean over the tokens of each micro-batch: TRL's bnpo."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ..core.batch import RolloutBatch
from ..core.kinds import Aggregate, Columns
from ..core.registry import register


@register("aggregate", "bnpo")
@dataclass
class BNPO(Aggregate):
    """Every micro-batch is averaged over its own tokens, and the micro-batches over their number.

    weight = mask [B,T], count = tokens per row [B]; the total that divides is that of the micro-batch times the number
    of micro-batches in the optimizer step (`scope="micro"`). TRL's `loss_type="bnpo"`.

    The loss therefore depends on how rows are spread over micro-batches; with one micro-batch it is `token_mean`.
    """

    scope = "micro"

    def __call__(self, batch: RolloutBatch, mask: Tensor) -> Columns:
        weight = mask.to(batch.dtype)
        return {"weight": weight, "count": weight.sum(1)}
