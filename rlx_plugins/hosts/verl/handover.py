"""From the prepared batch on the driver to what every micro-batch in a training worker carries."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ...core.batch import RolloutBatch
from ...core.config import Parts
from ...core.objective import POLICY
from ...core.registry import implements
from ...core.state import state_fields
from ..loss_terms import ENTROPY, count_columns
from ..signals import TOP_TOKENS
from .columns import CARRIED, step_totals, worker_fields
from .loss import LOSS_KINDS

DRIVER_ONLY = frozenset({"rollout", "prompt_ids", "row"})
"""Columns that never leave the driver."""

ON_DEMAND = TOP_TOKENS | frozenset(
    "hint_mask turn_ids segment_ids staleness logp_rollout logp_behavior logp_teacher entropy reward_components"
    " component_names helped source correct correction_weight uid session_id index".split()
)
"""Columns of the host that are sent only where a part of the loss phase requires them; so are a user's signals."""


def hand_over(
    parts: Parts, batch: RolloutBatch, place: Tensor, rows: Tensor, *, ranks: int, rows_per_step: int
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Fields of verl's N rows for its training workers, and the non-tensor entry that holds for all of them.

    batch   prepared rows; place [B] says which of verl's rows each is, and verl's other rows are padding
    rows    [N] response tokens of verl's rows (after cutting)
    ranks, rows_per_step   data-parallel ranks, and rows of one optimizer step over all of them
    """
    read = wanted_columns(parts)
    unread = (ON_DEMAND | (parts.requires - frozenset().union(*(p.provides for p in parts)))) - read
    fields, values = worker_fields(batch, place, rows, lambda name: _sent(name, unread))
    counts = {}
    for term, column in count_columns(parts).items():
        counts[term] = _spread(batch[column], place, len(rows))
    counts[ENTROPY] = _spread(batch.response_mask.sum(1).to(counts[POLICY].dtype), place, len(rows))
    fields |= step_totals(counts, ranks=ranks, rows_per_step=rows_per_step)
    run = {"step": batch.step, "total_steps": batch.total_steps, "seed": batch.seed, "values": values}
    credit = parts.one("advantage")
    if implements(credit, "in_loss") and state_fields(credit):
        run["advantage"] = credit.state_dict()
    return fields, run


def wanted_columns(parts: Parts) -> frozenset[str]:
    """Signals that parts of the loss phase require."""
    chosen = [p for kind in LOSS_KINDS for p in parts[kind]] + [p for p in parts if implements(p, "from_logits")]
    if implements(parts.one("advantage"), "in_loss"):
        chosen.append(parts.one("advantage"))
    return frozenset().union(*(p.requires for p in chosen))


def needs_entropy(parts: Parts) -> bool:
    """Whether the loss needs the current policy's entropy."""
    return "entropy" in wanted_columns(parts)


def _sent(name: str, unread: frozenset[str]) -> bool:
    return name not in DRIVER_ONLY and name not in CARRIED and name not in unread


def _spread(column: Tensor, place: Tensor, n: int) -> Tensor:
    full = column.new_zeros(n)
    full[place] = column
    return full
