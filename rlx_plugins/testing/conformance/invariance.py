"""Checks that what is computed depends on the model tokens only: not on the order of rows, padding, or garbage."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...core.batch import RolloutBatch
from .comparing import first_difference
from .report import Failed
from .subject import LOGITS, TEACHER_LOGITS, WEIGHT, Outcome, Subject

GARBAGE = {"NaN": (torch.nan,), "infinite and huge numbers": (torch.inf, -torch.inf, 1e30, -1e30)}
OTHER_LOGITS = (30.0, -30.0, 0.0)
"""What stands in their place in logits, which a model makes for every token, and makes finite."""
PADDING = 2


def row_permutation(subject: Subject) -> None:
    """Rows in another order give the same results in that order, from the same state."""
    for hook in subject.hooks_or_skip():
        batch = subject.sample(hook)
        order = torch.randperm(batch.size, generator=torch.Generator().manual_seed(1))
        moved, want = batch.rows(order), _in_order(subject.call(hook, batch), order)
        found = first_difference(subject.call(hook, moved), want, subject.tokens(subject.part(), moved))
        if found is not None:
            raise Failed(
                "results that move with their rows",
                f"with the rows permuted, {hook.name} gives {found}",
                "use batch.groups for statistics and row_id for draws, never the position of a row",
            )


def padding(subject: Subject) -> None:
    """Further padding on the right changes neither values nor gradients."""
    for hook in subject.hooks_or_skip():
        batch = subject.sample(hook)
        width = batch.response_mask.shape[1]
        padded = padded_batch(batch)
        got = subject.call(hook, padded)
        got.values = {name: _narrowed(x, padded.response_mask.shape, width) for name, x in got.values.items()}
        spilled = [name for name, g in got.gradients.items() if bool((g[:, width:] != 0).any())]
        got.gradients = {name: g[:, :width] for name, g in got.gradients.items()}
        found = first_difference(got, subject.call(hook, batch), subject.tokens(subject.part(), batch))
        if spilled:
            found = f"a gradient of {spilled[0].removeprefix('loss:')} on the padding"
        if found is not None:
            raise Failed(
                "results that do not depend on the padding",
                f"with {PADDING} more columns, {hook.name} gives {found}",
                "count and average over response_mask, not over the width of the tensors",
            )


def padded_batch(batch: RolloutBatch) -> RolloutBatch:
    """The batch with `PADDING` more columns of what stands behind the end of its shortest row."""
    mask = batch.response_mask
    shortest = int(batch.lengths.argmin())

    def wider(column: Any) -> Any:
        if not (isinstance(column, Tensor) and column.shape[:2] == mask.shape):
            return column
        fill = column[shortest, -1].expand(len(mask), PADDING, *column.shape[2:])
        return torch.cat([column, fill], 1)

    return batch.with_columns(**{name: wider(column) for name, column in batch.items()})


def masked_garbage(subject: Subject) -> None:
    """What stands where no mask is on, NaN, infinite or huge, reaches neither values nor gradients."""
    for hook in subject.hooks_or_skip():
        part, batch = subject.part(), subject.sample(hook)
        legible = subject.legible(part, batch)
        clean, tokens = subject.call(hook, batch), subject.tokens(part, batch)
        for words, numbers in GARBAGE.items():
            got = subject.call(hook, with_garbage(batch, legible, numbers))
            found = first_difference(got, clean, tokens) or _spilled(part.kind, got, legible)
            if found is not None:
                raise Failed(
                    "results and gradients that do not depend on masked tokens",
                    f"with {words} there, {hook.name} gives {found}",
                    "select before arithmetic: rlx.masked(x, mask), never x * mask",
                )


def with_garbage(batch: RolloutBatch, legible: Tensor, numbers: tuple[float, ...]) -> RolloutBatch:
    """The batch with `numbers`, in turn, in every float column [B,T,...] where `legible` is False."""
    columns = {}
    for name, column in batch.token_columns().items():
        if not column.dtype.is_floating_point or name == WEIGHT or name.endswith("_weight"):
            continue
        dirt = torch.tensor(OTHER_LOGITS if name in (LOGITS, TEACHER_LOGITS) else numbers, dtype=column.dtype)
        dirt = dirt.repeat(column.numel() // len(dirt) + 1)[: column.numel()]
        where = legible.reshape(legible.shape + (1,) * (column.ndim - 2))
        columns[name] = torch.where(where, column, dirt.reshape(column.shape))
    return batch.with_columns(**columns)


ZERO_OUTSIDE = {"advantage": "advantages", "aggregate": "weight", "auxiliary": "weight"}
FINITE_OUTSIDE = {"correction": "weight", "selector": "weight"}
"""Kind -> its column that the core passes on, or multiplies with another, where the mask is off too."""


def _spilled(kind: str, got: Outcome, legible: Tensor) -> str | None:
    """What reached the masked tokens, in words."""
    zero, finite = (got.values.get(names.get(kind, "")) for names in (ZERO_OUTSIDE, FINITE_OUTSIDE))
    for name, gradient in got.gradients.items():
        if bool((gradient[~legible] != 0).any()):
            return f"masked tokens a gradient of {name.removeprefix('loss:')}"
    if zero is not None and bool((zero[~legible] != 0).any()):
        return f"masked tokens {ZERO_OUTSIDE[kind]} other than 0"
    if finite is not None and not bool(torch.isfinite(finite).all()):
        return f"masked tokens {FINITE_OUTSIDE[kind]} that is not finite"
    return None


def _in_order(outcome: Outcome, order: Tensor) -> Outcome:
    """The outcome with its rows in another order."""

    def moved(column: Any) -> Any:
        if isinstance(column, Tensor) and column.ndim and len(column) == len(order):
            return column[order]
        if isinstance(column, list) and len(column) == len(order):
            return [column[i] for i in order.tolist()]
        return column

    values, gradients = outcome.values.items(), outcome.gradients.items()
    return Outcome({name: moved(x) for name, x in values}, {name: g[order] for name, g in gradients})


def _narrowed(column: Any, shape: torch.Size, width: int) -> Any:
    return column[:, :width] if isinstance(column, Tensor) and column.shape[:2] == shape else column
