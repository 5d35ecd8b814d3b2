"""Columns with one list per row, of any length, as rectangular tensors."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
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
    values, lengths = _rectangle(column, "d", torch.nan)
    return values.to(batch.device, batch.dtype), lengths.to(batch.device)


def padded_ids(rows: Any, device: torch.device, width: int | None = None) -> Tensor:
    """[B,K] int64 from one list of ids per row (or a tensor as it is), cut or padded to `width` with -1."""
    if isinstance(rows, Tensor):
        return rows.to(torch.int64)
    values = _rectangle(rows, "q", -1)[0]
    if width is not None:
        values = torch.nn.functional.pad(values, (0, width - values.shape[1]), value=-1)
    return values.to(device)


def _rectangle(rows: Sequence[Any], code: str, fill: float) -> tuple[Tensor, Tensor]:
    """[B,K] of the rows' numbers with `fill` behind them, and their lengths [B]; code "d": float64, "q": int64."""
    dtype = torch.float64 if code == "d" else torch.int64
    flat, lengths = _joined(rows, code, dtype)
    width = int(lengths.max()) if len(rows) else 0
    values = torch.full((len(rows), width), fill, dtype=dtype)
    return values.masked_scatter_(torch.arange(width) < lengths[:, None], flat), lengths


def _joined(rows: Sequence[Any], code: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The rows' numbers one after the other, and how many each has.

    Lists go through one flat buffer: a tensor made of nested lists takes seven times as long.
    """
    if rows and all(isinstance(row, Tensor) for row in rows):
        return torch.cat([row.to(dtype) for row in rows]).cpu(), torch.tensor([len(row) for row in rows])
    flat: array[Any] = array(code)
    ends = [0]
    for row in rows:
        _extend(flat, () if row is None else row)
        ends.append(len(flat))
    return torch.frombuffer(flat, dtype=dtype) if flat else torch.zeros(0, dtype=dtype), torch.tensor(ends).diff()


def _extend(flat: array[Any], row: Any) -> None:
    """Append the row's numbers; None becomes NaN."""
    row = row.tolist() if hasattr(row, "tolist") else row
    before = len(flat)
    try:
        flat.extend(row)
    except TypeError:  # None inside
        del flat[before:]
        flat.extend(torch.nan if v is None else v for v in row)
