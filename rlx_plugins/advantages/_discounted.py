"""Discounted sums along the tokens of a row."""

from __future__ import annotations

import torch
from torch import Tensor

from ..core.terms import masked

BLOCK = 32
"""Tokens that are summed by one matrix product."""


def discounted_sums(x: Tensor, factor: Tensor) -> Tensor:
    """y_t = x_t + factor y_{t+1} along each row of `x` [B,T]; `factor` [B], or [1] for all rows.

    Every row is cut into blocks, which one matrix product sums; what lies behind a block is the same sum over the
    blocks, with factor^BLOCK.
    """
    rows, width = x.shape
    size = min(BLOCK, max(width, 1))
    blocks = -(-width // size)
    power = factor[:, None] ** torch.arange(size + 1, device=x.device)
    reversed_ = torch.nn.functional.pad(power[:, :size].flip(1), (0, size - 1))
    weight = reversed_.unfold(1, size, 1).flip(1)  # [from, to]: factor^(from - to), 0 for from < to
    inside = torch.nn.functional.pad(x, (0, blocks * size - width)).view(rows, blocks, size) @ weight
    if blocks > 1:
        whole = discounted_sums(inside[:, :, 0], power[:, size])
        behind = torch.nn.functional.pad(whole[:, 1:], (0, 1))
        inside = inside + behind[:, :, None] * power[:, None, 1:].flip(2)
    return inside.view(rows, blocks * size)[:, :width]


class Packing:
    """The entries of `mask` [B,T] moved together at the left of their row."""

    def __init__(self, mask: Tensor):
        place = mask.cumsum(1)
        self.mask = mask
        self._there = torch.arange(mask.shape[1], device=mask.device) < place[:, -1:]
        self._from = place.sub_(1).clamp_(min=0)

    def pack(self, x: Tensor) -> Tensor:
        """`x` [B,T] packed, 0 behind the entries of each row."""
        return torch.zeros_like(x).masked_scatter_(self._there, x.masked_select(self.mask))

    def unpack(self, x: Tensor) -> Tensor:
        """What `pack` moved back in its place, 0 outside the mask."""
        return masked(x.gather(1, self._from), self.mask)


def discounted_returns(rewards: Tensor, mask: Tensor, discount: float) -> Tensor:
    """[B,T] ret_t = r_t + discount * ret_{t+1} over the tokens of `mask`; 0 at the others, which are passed over."""
    packing = Packing(mask)
    return packing.unpack(discounted_sums(packing.pack(rewards), rewards.new_full((1,), discount)))
