"""Steps (turns) of rollouts as entries of their own: one number per step instead of one per token."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from ..advantages._runs import Runs
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
        runs = Runs(torch.where(mask, turn_ids, -1))
        there = runs.of >= 0
        rows = torch.arange(len(mask), device=mask.device)[:, None].expand_as(runs.of)
        pairs, number = torch.unique(torch.stack([rows[there], runs.of[there].long()], 1), dim=0, return_inverse=True)
        of_run = torch.full(there.shape, -1, device=mask.device).masked_scatter_(there, number)
        return cls(pairs[:, 0], pairs[:, 1], runs.spread(of_run))

    def __len__(self) -> int:
        return len(self.row)

    def sum(self, x: Tensor) -> Tensor:
        """[S] sums of [B,T] values over the tokens of each step."""
        x = wide(x)
        sums = torch.zeros(len(self) + 1, dtype=x.dtype, device=x.device)
        return sums.index_add_(0, self._bins, x.flatten())[1:]

    def mean(self, x: Tensor) -> Tensor:
        """[S] means of [B,T] values over the tokens of each step."""
        return self.sum(x) / torch.bincount(self._bins, minlength=len(self) + 1)[1:]

    @functools.cached_property
    def _bins(self) -> Tensor:
        """[B*T] int64: 1 + the step of each token; 0 for those of no step, whose sum nobody reads."""
        return self.index.flatten() + 1

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
    return masked(wide(x), mask).sum(1) / mask.sum(1, dtype=torch.int32).clamp(min=1)
