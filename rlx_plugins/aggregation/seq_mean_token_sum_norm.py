"""Mean over rollouts of the sum over each rollout's tokens, divided by one constant length."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ..core.batch import RolloutBatch
from ..core.kinds import Aggregate, Columns
from ..core.params import param
from ..core.registry import register
from ._rows import EmptyRows, rows_counted


@register("aggregate", "seq_mean_token_sum_norm")
@dataclass
class SeqMeanTokenSumNorm(Aggregate):
    """The token losses of a rollout are summed and divided by one constant, so a token's weight depends on no length.

    weight = mask / horizon [B,T], count = 1 per row [B]. Dr. GRPO's reduction: verl's `seq-mean-token-sum-norm`
    (`loss_scale_factor` is the horizon); TRL's `loss_type="dr_grpo"` with `empty_rows="count"` and the horizon
    `max_completion_length`.

    Without a horizon the width T of the batch divides, as in verl, and varies from step to step: give one.
    """

    paper = "Understanding R1-Zero-Like Training: A Critical Perspective, arXiv 2503.20783"

    horizon: int | None = param(None, ge=1, doc="tokens that divide the sum; None: the width of the batch (verl)")
    empty_rows: EmptyRows = param("skip", doc="rows without a model token: skip (verl), or count as a loss of 0 (TRL)")

    def __call__(self, batch: RolloutBatch, mask: Tensor) -> Columns:
        horizon = mask.shape[1] if self.horizon is None else self.horizon
        return {
            "weight": mask.to(batch.dtype) / max(horizon, 1),
            "count": rows_counted(mask, self.empty_rows, batch.dtype),
        }
