"""Columns with one list per row, of any length, as rectangular tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..core.batch import RolloutBatch


def ragged(batch: RolloutBatch, name: str) -> tuple[Tensor, Tensor]:
    """The column `name` as (values [B,K], lengths [B] int64), NaN behind the end of each row.

    A list of lists keeps its lengths (None inside: NaN; None for a row: no entry); the rows of a tensor [B,K] end with
    their last number that is not NaN.
    """
    column = batch[name]
    if isinstance(column, Tensor):
        column = column[:, None] if column.ndim == 1 else column
        there = ~torch.isnan(column)
        last = torch.where(there, torch.arange(1, column.shape[1] + 1, device=column.device), 0)
        lengths = last.amax(1) if column.shape[1] else last.sum(1)
        return column.to(batch.dtype), lengths
    rows = [[torch.nan if v is None else float(v) for v in (() if row is None else row)] for row in column]
    width = max(map(len, rows), default=0)
    values = [row + [torch.nan] * (width - len(row)) for row in rows]
    return (
        torch.tensor(values, dtype=batch.dtype, device=batch.device).reshape(len(rows), width),
        torch.tensor([len(row) for row in rows], device=batch.device),
    )


def padded_ids(rows: Any, device: torch.device, width: int | None = None) -> Tensor:
    """[B,K] int64 from one list of ids per row (or a tensor as it is), cut or padded to `width` with -1."""
    if isinstance(rows, Tensor):
        return rows.to(torch.int64)
    rows = [list(row) if row is not None else [] for row in rows]
    width = max(map(len, rows), default=0) if width is None else width
    values = [row[:width] + [-1] * (width - len(row)) for row in rows]
    return torch.tensor(values, dtype=torch.int64, device=device).reshape(len(rows), width)
