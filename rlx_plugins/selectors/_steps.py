"""Steps (turns) of rollouts as entries of their own: one number per step instead of one per token."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..core.segments import Segments, wide
from ..core.terms import masked


@dataclass
class Steps:
    """The steps of a batch that have tokens, S of them, by row and then by turn.

    row    [S] int64: the row each step belongs to
    turn   [S] int64: its turn id
    index  [B,T] int64: the step of each token, -1 for tokens of no step
    """

    row: Tensor
    turn: Tensor
    index: Tensor

    @classmethod
    def of(cls, turn_ids: Tensor, mask: Tensor) -> Steps:
        """The steps of the tokens of `mask` [B,T] with a turn id that is not negative."""
        there = mask & (turn_ids >= 0)
        rows = torch.arange(len(mask), device=mask.device)[:, None].expand_as(turn_ids)
        pairs = torch.stack([rows[there], turn_ids[there].long()], 1)
        unique, inverse = torch.unique(pairs, dim=0, return_inverse=True)
        index = torch.full(mask.shape, -1, device=mask.device)
        index[there] = inverse
        return cls(unique[:, 0], unique[:, 1], index)

    def __len__(self) -> int:
        return len(self.row)

    def sum(self, x: Tensor) -> Tensor:
        """[S] sums of [B,T] values over the tokens of each step."""
        there = self.index >= 0
        x = wide(x)
        return torch.zeros(len(self), dtype=x.dtype, device=x.device).index_add_(0, self.index[there], x[there])

    def mean(self, x: Tensor) -> Tensor:
        """[S] means of [B,T] values over the tokens of each step."""
        return self.sum(x) / self.sum(torch.ones_like(wide(x)))

    def spread(self, chosen: Tensor) -> Tensor:
        """[S] bool -> [B,T] bool: the tokens of the chosen steps."""
        if not len(self):
            return torch.zeros_like(self.index, dtype=torch.bool)
        return (self.index >= 0) & chosen[self.index.clamp(min=0)]


def quantile_by_group(groups: Segments, x: Tensor, share: float) -> Tensor:
    """[G] the linearly interpolated quantile of each group's finite values [N]; NaN for a group without any."""
    n = groups.count(x)
    order = groups.order(x)
    at = share * (n - 1).clamp(min=0)
    low = at.floor()
    last = max(len(x) - 1, 0)
    first = (groups.starts + low.long()).clamp(max=last)
    second = (groups.starts + at.ceil().long()).clamp(max=last)
    if not len(x):
        return torch.full_like(n, torch.nan)
    values = wide(x)[order]
    return torch.where(n > 0, torch.lerp(values[first], values[second], (at - low).to(values.dtype)), torch.nan)


def masked_rows(x: Tensor, mask: Tensor) -> Tensor:
    """[B] means of [B,T] values over the tokens of `mask`; 0 for a row without any."""
    return masked(wide(x), mask).sum(1) / mask.sum(1).clamp(min=1)
