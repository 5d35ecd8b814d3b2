"""Signals of a batch that take a forward pass of verl's workers, or a value model: made before the batch phase."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import transfer_queue as tq
from torch import Tensor
from transfer_queue import KVBatchMeta
from verl.workers.utils.padding import response_from_nested

from ...core.batch import RolloutBatch
from ..signals import PRIOR, VALUES
from ..value_model import value_columns
from . import averaged
from .columns import ASKED, CONFIDENCE, padded

if TYPE_CHECKING:
    from .trainer import RLXTrainer


def signal_columns(trainer: RLXTrainer, batch: Any, table: RolloutBatch, place: Tensor) -> dict[str, Tensor]:
    """confidence, logp_prox, values [B,T] and value_prior [B] of the table's rows, where a part reads them.

    batch  verl's batch; place [B] says which of its rows each of the table's is
    """
    assert trainer.parts is not None
    wanted = trainer.parts.requires - set(table)
    made: dict[str, Tensor] = {}
    if "confidence" in wanted:
        logits = {ASKED: CONFIDENCE, "compute_loss": True, "distillation_use_topk": True, "distillation_only": False}
        made["confidence"] = worker_forward(trainer, batch, CONFIDENCE, logits)
    if "logp_prox" in wanted:
        averaged.everywhere(trainer.actor_rollout_wg, averaged.put_in_place)
        made["logp_prox"] = worker_forward(trainer, batch, "log_probs", {"compute_loss": False})
        averaged.everywhere(trainer.actor_rollout_wg, averaged.put_back)
    width = table.response_mask.shape[1]
    columns = {name: padded(field, width)[place] for name, field in made.items()}
    if not VALUES & wanted:
        return columns
    values = _values(trainer, batch, table, place)
    return columns | {name: values[name] for name in VALUES & wanted}


def worker_forward(trainer: RLXTrainer, batch: Any, field: str, asked: dict[str, Any]) -> Tensor:
    """A forward pass of the training workers on all rows of verl's batch; its `field` over response tokens, nested."""
    temperature = trainer.config.actor_rollout_ref.rollout.temperature
    asked = {"calculate_entropy": False, "temperature": temperature, **asked}
    meta = KVBatchMeta(partition_id=batch.partition_id, keys=list(batch.keys), tags=list(batch.tags), extra_info=asked)
    trainer.actor_rollout_wg.compute_log_prob(meta)
    data = tq.kv_batch_get(batch.keys, batch.partition_id, select_fields=[field, "response_mask"])
    return response_from_nested(data[field], data["response_mask"])


def _values(trainer: RLXTrainer, batch: Any, table: RolloutBatch, place: Tensor) -> dict[str, Tensor]:
    """values [B,T] and value_prior [B]: of the value model, else of verl's critic."""
    if trainer.value_model is None:
        field = tq.kv_batch_get(batch.keys, batch.partition_id, select_fields=["values"])["values"]
        values = padded(field, table.response_mask.shape[1])[place]
        return {"values": values, PRIOR: values[:, 0]}
    data = tq.kv_batch_get(batch.keys, batch.partition_id, select_fields=["prompts", "responses"])
    prompts, responses = ([row.tolist() for row in data[name].unbind()] for name in ("prompts", "responses"))
    rows = place.tolist()
    return value_columns(
        trainer.value_model, [prompts[i] for i in rows], [responses[i] for i in rows], table.response_mask
    )
