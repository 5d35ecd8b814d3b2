"""What the aggregates that average over rows share."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

EmptyRows = Literal["skip", "count"]
"""What a row without a model token does to a mean over rows: "skip" it (verl), or "count" it as a loss of 0 (TRL)."""


def rows_counted(mask: Tensor, empty_rows: EmptyRows, dtype: torch.dtype) -> Tensor:
    """[B]: 1 for every row of `mask` [B,T] that enters the mean over rows, 0 for the others."""
    if empty_rows == "count":
        return torch.ones(len(mask), dtype=dtype, device=mask.device)
    return mask.any(1).to(dtype)
