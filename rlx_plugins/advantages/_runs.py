"""Runs of equal neighbours in the rows of a batch, so that work per turn or node is not work per token."""

from __future__ import annotations

import torch
from torch import Tensor


class Runs:
    """The entries of each row of `x` [B,T], as runs of equal neighbours.

    of      [B,R] the value of each run, -1 behind the row's last
    number  [B,T] int64: the run of each entry
    """

    def __init__(self, x: Tensor):
        begins = torch.zeros_like(x, dtype=torch.bool)
        begins[:, 1:] = x[:, 1:] != x[:, :-1]
        self.number = begins.cumsum(1)
        begins[:, :1] = True
        self._first = begins.flatten().nonzero()[:, 0]
        count = self.number[:, -1:] + 1
        self._there = torch.arange(int(count.max()) if len(x) else 0, device=x.device) < count
        self.of = self._by_row(x.flatten()[self._first], -1)

    def spread(self, per_run: Tensor) -> Tensor:
        """[B,R] -> [B,T]: every entry its run's."""
        return per_run.gather(1, self.number)

    def any(self, mask: Tensor) -> Tensor:
        """[B,R] bool: whether the run has an entry of `mask` [B,T]."""
        so_far = torch.nn.functional.pad(mask.flatten().cumsum(0, dtype=torch.int32), (1, 0))
        edges = torch.nn.functional.pad(self._first, (0, 1), value=mask.numel())
        return self._by_row(so_far[edges].diff() > 0, False)

    def _by_row(self, per_run: Tensor, fill: int | bool) -> Tensor:
        """[B,R] of the runs' values in order."""
        out = torch.full(self._there.shape, fill, dtype=per_run.dtype, device=per_run.device)
        return out.masked_scatter_(self._there, per_run)
