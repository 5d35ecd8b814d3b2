"""What both trainers' losses share: the terms by name with their counts, and the refusal of NaN."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..core.batch import RolloutBatch
from ..core.config import Parts
from ..core.errors import DataError
from ..core.objective import DISTILL, POLICY

ENTROPY = "entropy"
"""Name of the entropy bonus among the totals; its count is the number of model tokens."""


def micro_terms(parts: Parts) -> frozenset[str]:
    """Loss terms whose aggregate normalises by the micro-batch it sees."""
    rules = {POLICY: parts.one("aggregate")}
    if parts["distill"]:
        rules[DISTILL] = parts.one("distill_aggregate") or parts.one("aggregate")
    return frozenset(name for name, rule in rules.items() if rule.scope == "micro")


def count_columns(parts: Parts) -> dict[str, str]:
    """Loss term -> the column of its count."""
    columns = {POLICY: "loss_count"}
    if parts["distill"]:
        columns[DISTILL] = "distill_count"
    return columns | {part.name: f"{part.name}_count" for part in parts["auxiliary"]}


def refuse_nan(
    logp_new: Tensor, batch: RolloutBatch, step: int, sum_over_ranks: Callable[[Tensor], Tensor] | None = None
) -> None:
    """Raise DataError if a log-prob [B,T] of a trained token of the micro-batch is NaN: nothing is updated.

    With `sum_over_ranks` all ranks call it together, and all raise if it is so on any.
    """
    bad = (torch.isnan(logp_new) & batch.response_mask).any(1)
    if int(bad.sum() if sum_over_ranks is None else sum_over_ranks(bad.sum())) == 0:
        return
    rows = bad.nonzero()[:, 0].tolist()
    if not rows:
        which = " on another rank"
    else:
        first = f", first for prompt {batch.prompt_key[rows[0]]!r}" if batch.has("prompt_key") else ""
        which = f"{first} ({len(rows)} of {len(bad)} rows of a micro-batch)"
    raise DataError(
        f"logp_new is NaN on a model token in step {step}{which}; the policy has diverged or the forward pass is"
        " broken: lower the learning rate or check the dtype"
    )
