"""Statistics over ragged groups, without a loop and without padding.

`Segments` holds which group each row is in; its methods take [B] or [B, ...] values and return [G, ...] per-group
results, which `spread` brings back to the rows. Entries that are not finite, and rows where `where` is False, are left
out of every statistic. Groups may be of any size and their rows anywhere in the batch. Half precision is computed, and
returned, in float32.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor


class Segments:
    """Rows by group.

    index   [B] int64, dense group number of each row, groups numbered in ascending order of their id
    ids     [G] the group ids
    """

    def __init__(self, group: Tensor):
        if group.ndim != 1:
            raise ValueError(f"group ids must be one per row, shape [B]; got {tuple(group.shape)}")
        self.group = group
        self.equal_size: int | None = None
        steps = group[1:] - group[:-1]
        if bool((steps >= 0).all()):  # rows in ascending group order: no sort needed
            starts = torch.ones_like(group, dtype=torch.bool)
            starts[1:] = steps != 0
            self.index = starts.cumsum(0) - 1
            self.ids = group[starts]
            size = len(group) // max(1, len(self.ids))
            if size * len(self.ids) == len(group) and bool(starts[:: max(1, size)].all()):
                self.equal_size = size  # groups are blocks of this many rows: reductions over a view
        else:
            self.ids, self.index = torch.unique(group, return_inverse=True)

    def __len__(self) -> int:
        """Number of groups G."""
        return len(self.ids)

    @functools.cached_property
    def sizes(self) -> Tensor:
        """[G] int64: rows per group, whatever their values."""
        return torch.bincount(self.index, minlength=len(self))

    @functools.cached_property
    def starts(self) -> Tensor:
        """[G] int64: place of each group's first row in an order by group (see `order`)."""
        return self.sizes.cumsum(0) - self.sizes

    def spread(self, per_group: Tensor) -> Tensor:
        """[G, ...] -> [B, ...]: every row gets its group's value."""
        if self.equal_size is not None:
            return per_group.repeat_interleave(self.equal_size, 0)
        return per_group[self.index]

    def sum(self, x: Tensor, where: Tensor | None = None) -> Tensor:
        """[G, ...] sums of the counted entries; 0 for a group without any."""
        x = wide(x) if x.dtype.is_floating_point else x
        return self._add(_select(x, counted(x, where)))

    def count(self, x: Tensor, where: Tensor | None = None) -> Tensor:
        """[G, ...] number of counted entries, in the dtype of the means of `x`."""
        return self._add(counted(x, where).to(wide(x).dtype))

    def mean(self, x: Tensor, where: Tensor | None = None) -> Tensor:
        """[G, ...] means; 0 for a group without counted entries."""
        x = wide(x)
        ok = counted(x, where)
        return self._mean(x, ok, self._add(ok.to(x.dtype)))

    def mean_std(self, x: Tensor, where: Tensor | None = None, ddof: int = 1) -> tuple[Tensor, Tensor, Tensor]:
        """Per-group (mean, std, count), [G, ...] each. std is 0 for groups with at most `ddof` counted entries."""
        x = wide(x)
        ok = counted(x, where)
        n = self._add(ok.to(x.dtype))
        mean = self._mean(x, ok, n)
        centred = _select(x - self.spread(mean), ok)
        var = self._add(centred * centred) / (n - ddof).clamp(min=1)
        return mean, torch.where(n > ddof, var.sqrt(), torch.zeros_like(var)), n

    def std(self, x: Tensor, where: Tensor | None = None, ddof: int = 1) -> Tensor:
        """[G, ...] standard deviations; 0 for groups with at most `ddof` counted entries."""
        return self.mean_std(x, where, ddof)[1]

    def min(self, x: Tensor, where: Tensor | None = None) -> Tensor:
        """[G, ...] minima; +inf for a group without counted entries."""
        return self._extreme(x, counted(x, where), "amin", torch.inf)

    def max(self, x: Tensor, where: Tensor | None = None) -> Tensor:
        """[G, ...] maxima; -inf for a group without counted entries."""
        return self._extreme(x, counted(x, where), "amax", -torch.inf)

    def median(self, x: Tensor, where: Tensor | None = None) -> Tensor:
        """[G] medians of [B] values (mean of the two middle ones); NaN for a group without counted entries."""
        x = wide(x)
        ok = counted(x, where)
        n = self._add(ok.long())
        last = len(x) - 1
        low = (self.starts + ((n - 1).clamp(min=0) // 2)).clamp(max=last)
        high = (self.starts + n.clamp(min=1) // 2).clamp(max=last)
        values = x[self.order(x, ok)]
        middle = (values[low] + values[high]) / 2
        return torch.where(n > 0, middle, torch.full_like(middle, torch.nan))

    def rank(self, x: Tensor, where: Tensor | None = None) -> Tensor:
        """[B] int64: place of each counted row in its group by ascending value, ties by row; -1 if not counted."""
        ok = counted(x, where)
        order = self.order(x, ok)
        place = torch.empty_like(order)
        place[order] = torch.arange(len(x), device=x.device)
        return torch.where(ok, place - self.spread(self.starts), torch.full_like(place, -1))

    def order(self, x: Tensor, where: Tensor | None = None) -> Tensor:
        """[B] int64: the rows by group, then ascending value of `x` [B], then row; uncounted ones end their group."""
        by_value = torch.argsort(torch.where(counted(x, where), x, torch.full_like(x, torch.inf)), stable=True)
        return by_value[torch.argsort(self.index[by_value], stable=True)]

    def _mean(self, x: Tensor, ok: Tensor, n: Tensor) -> Tensor:
        """Means as maximum + mean distance from it: exact for equal entries, which then differ from it by exactly 0."""
        top = self._extreme(x, ok, "amax", -torch.inf)
        top = _select(top, n > 0)
        return top + self._add(_select(x - self.spread(top), ok)) / n.clamp(min=1)

    def _blocks(self, x: Tensor) -> Tensor:
        """[G, size, ...] view of [B, ...] where all groups are blocks of one size."""
        return x.reshape(len(self), self.equal_size or 0, *x.shape[1:])

    def _add(self, x: Tensor) -> Tensor:
        if self.equal_size is not None:
            return self._blocks(x).sum(1, dtype=x.dtype)
        return torch.zeros(len(self), *x.shape[1:], dtype=x.dtype, device=x.device).index_add_(0, self.index, x)

    def _extreme(self, x: Tensor, ok: Tensor, how: str, empty: float) -> Tensor:
        filled = torch.where(ok, x, torch.full_like(x, empty))
        if self.equal_size:
            return getattr(self._blocks(filled), how)(1)
        out = torch.full((len(self), *x.shape[1:]), empty, dtype=x.dtype, device=x.device)
        index = self.index.reshape(-1, *(1,) * (x.ndim - 1)).expand_as(x)
        return out.scatter_reduce_(0, index, filled, how)


def counted(x: Tensor, where: Tensor | None = None) -> Tensor:
    """Entries that enter a statistic: finite, and where `where` ([B], or the shape of `x`) is True."""
    ok = torch.isfinite(x)
    if where is None:
        return ok
    return ok & where.reshape(where.shape + (1,) * (x.ndim - where.ndim))


def wide(x: Tensor) -> Tensor:
    """`x` in float32 or better: sums and counts in half precision would be wrong beyond a few hundred rows."""
    if x.dtype in (torch.float32, torch.float64):
        return x
    return x.to(torch.float32 if x.dtype.is_floating_point else torch.get_default_dtype())


def overall_mean_std(x: Tensor, where: Tensor | None = None, ddof: int = 1) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation (scalars) over all counted entries; both 0 without any, std 0 with at most `ddof`."""
    x = wide(x)
    ok = counted(x, where)
    n = ok.sum()
    mean = _select(x, ok).sum() / n.clamp(min=1)
    var = _select(x - mean, ok).square().sum() / (n - ddof).clamp(min=1)
    return mean, _select(var.sqrt(), n > ddof)


def _select(x: Tensor, ok: Tensor) -> Tensor:
    return torch.where(ok, x, torch.zeros((), dtype=x.dtype, device=x.device))


def zscore(segments: Segments, x: Tensor, eps: float, ddof: int = 1, where: Tensor | None = None) -> Tensor:
    """(x - group mean) / (group std + eps), 0 where not counted and in groups of one."""
    mean, std, n = segments.mean_std(x, where, ddof)
    ok = counted(x, where) & (segments.spread(n) > 1)
    return _select((x - segments.spread(mean)) / (segments.spread(std) + eps), ok)
