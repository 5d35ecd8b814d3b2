"""Mean over rollouts of the mean over each rollout's tokens."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ..core.batch import RolloutBatch
from ..core.kinds import Aggregate, Columns
from ..core.params import param
from ..core.registry import register
from ._rows import EmptyRows, rows_counted


@register("aggregate", "seq_mean_token_mean")
@dataclass
class SeqMeanTokenMean(Aggregate):
    """Every rollout weighs the same, whatever its length: the mean of its token losses, averaged over rollouts.

    weight = mask / tokens of the row [B,T], count = 1 per row [B]. The original GRPO objective: verl's
    `seq-mean-token-mean`, TRL's `loss_type="grpo"` (with `empty_rows="count"`).

    verl divides by the row's tokens + 1e-8; here by the tokens, the same number in float32.
    """

    paper = "DeepSeekMath: Pushing the Limits of Mathematical Reasoning in Open Language Models, arXiv 2402.03300"

    empty_rows: EmptyRows = param("skip", doc="rows without a model token: skip (verl), or count as a loss of 0 (TRL)")

    def __call__(self, batch: RolloutBatch, mask: Tensor) -> Columns:
        tokens = mask.sum(1, keepdim=True).clamp(min=1)
        return {
            "weight": mask.to(batch.dtype) / tokens.to(batch.dtype),
            "count": rows_counted(mask, self.empty_rows, batch.dtype),
        }
