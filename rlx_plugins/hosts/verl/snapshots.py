"""The weights of the last policy versions, in the training workers' host memory: exact log-probs for stale tokens.

The functions with a `worker` run in the workers. The current version is stored before the update; a stale token's
log-prob is that under the version that sampled it, in the trainer's arithmetic, where that version is still kept.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...core.batch import RolloutBatch
from ..old_logits import OldLogits, Snapshots, available, old_logits, versions_in
from . import averaged
from .columns import padded
from .forward import worker_forward

if TYPE_CHECKING:
    from .trainer import RLXTrainer

KEPT = "rlx_snapshots"
"""Attribute of verl's actor worker: its share of the versions' weights."""


def store(worker: Any, version: int, keep: int) -> None:
    """Keep this worker's share of the weights of now as `version`, and those of the `keep` - 1 versions before."""
    actor = averaged.actor_of(worker)
    if not hasattr(actor, KEPT):
        setattr(actor, KEPT, Snapshots(keep))
    getattr(actor, KEPT).store(version, [w.to("cpu", copy=True) for w in averaged.local_weights(actor)])


def put_in_place(worker: Any, version: int) -> None:
    """Give the model the weights of `version`, until `averaged.put_back`."""
    actor = averaged.actor_of(worker)
    averaged.lend(actor, getattr(actor, KEPT).weights[version])


class Versions:
    """The versions the workers keep, as the driver knows them.

    keep  how many, the current one included
    """

    def __init__(self, keep: int):
        self.keep = keep
        self.stored: set[int] = set()

    def behavior(
        self, trainer: RLXTrainer, batch: Any, table: RolloutBatch, place: Tensor, version: int
    ) -> tuple[Tensor, dict[str, float]]:
        """`logp_behavior` [B,T] of the table's rows, exact where the version that sampled is kept; and metrics.

        version  that of the weights as they stand, which are stored. Where a version is no longer there the table's
        own value stays (the engine's log-prob); `old_logits/missing` counts these tokens.
        """
        averaged.everywhere(trainer.actor_rollout_wg, store, version, self.keep)
        self.stored = {v for v in self.stored if v > version - self.keep} | {version}
        sampled_by = version - table.staleness
        present = versions_in(sampled_by, table.response_mask, version)
        kept = [v for v in available(present, version, "snapshot", self.keep) if v in self.stored]

        def score(v: int) -> Tensor:
            if v == version:
                return table.logp_old
            averaged.everywhere(trainer.actor_rollout_wg, put_in_place, v)
            field = worker_forward(trainer, batch, "log_probs", {"compute_loss": False})
            averaged.everywhere(trainer.actor_rollout_wg, averaged.put_back)
            return padded(field, table.response_mask.shape[1])[place].to(table.logp_old.dtype)

        found: OldLogits = old_logits(sampled_by, table.response_mask, kept, score)
        told = {"old_logits/missing": float(found.missing), "old_logits/versions": float(len(kept))}
        return torch.where(found.exact, found.logp, table.logp_behavior), told
