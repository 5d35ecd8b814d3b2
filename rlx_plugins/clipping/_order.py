"""The k-th smallest of the tokens of a micro-batch, without the host waiting for an accelerator."""

from __future__ import annotations

import torch
from torch import Tensor


def kth_smallest(x: Tensor, k: Tensor) -> Tensor:
    """The `k`-th smallest entry of `x`, counted from 1; both as tensors, `k` at most the number of entries.

    On a CPU, selecting takes a tenth of the time of sorting. It needs `k` as a number, for which the host would have to
    wait on an accelerator; those sort fast.
    """
    x = x.flatten()
    if x.device.type == "cpu":
        return x.kthvalue(int(k)).values
    return x.sort().values.index_select(0, (k.long() - 1).reshape(1)).squeeze(0)


def first_k(keys: Tensor, candidates: Tensor, k: Tensor) -> Tensor:
    """[B,T] bool: the `k` candidates of smallest key (all, where there are fewer), ties in the order of the tokens."""
    keys = torch.where(candidates, keys, torch.inf)
    last = kth_smallest(keys, k.clamp(max=keys.numel()))
    before, level = candidates & (keys < last), candidates & (keys == last)
    place = level.flatten().cumsum(0, dtype=torch.int32).view_as(level)
    return before | (level & (place <= k - before.sum()))
