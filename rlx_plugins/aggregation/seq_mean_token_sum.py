"""Mean over rollouts of the sum over each rollout's tokens."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ..core.batch import RolloutBatch
from ..core.kinds import Aggregate, Columns
from ..core.params import param
from ..core.registry import register
from ._rows import EmptyRows, rows_counted


@register("aggregate", "seq_mean_token_sum")
@dataclass
class SeqMeanTokenSum(Aggregate):
    """A rollout's token losses are summed, and the sums averaged over rollouts: long rollouts weigh more.

    weight = mask [B,T], count = 1 per row [B]. verl's `seq-mean-token-sum`; TRL's `loss_type="luspo"` (with
    `empty_rows="count"`): summing a sequence-level loss over its tokens scales it by the length of the rollout
    (arXiv 2602.05261).
    """

    empty_rows: EmptyRows = param("skip", doc="rows without a model token: skip (verl), or count as a loss of 0 (TRL)")

    def __call__(self, batch: RolloutBatch, mask: Tensor) -> Columns:
        return {"weight": mask.to(batch.dtype), "count": rows_counted(mask, self.empty_rows, batch.dtype)}
