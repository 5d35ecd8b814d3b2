"""A per-token column that datasets or users' rollout code supply."""

from __future__ import annotations

import torch
from torch import Tensor

from ..core.batch import RolloutBatch
from ..core.errors import DataError
from ._ragged import ragged


def token_column(batch: RolloutBatch, name: str, fill: float = 0.0) -> Tensor:
    """The column `name` as [B,T]: a tensor as it is, one list per row cut or padded with `fill` on the right.

    DataError for a tensor that has not one value per response token.
    """
    column, shape = batch[name], batch.response_mask.shape
    if isinstance(column, Tensor):
        if column.shape != shape:
            raise DataError(
                f"the column {name!r} needs one value per response token, {tuple(shape)}; its shape is"
                f" {tuple(column.shape)}"
            )
        return column
    values = ragged(batch, name)[0][:, : shape[1]]
    short = values.new_full((shape[0], shape[1] - values.shape[1]), fill)
    return torch.cat([torch.nan_to_num(values, nan=fill), short], 1)
