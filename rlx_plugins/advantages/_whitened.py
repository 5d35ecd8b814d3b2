"""Normalisation over all tokens of the batch, as in verl's masked whitening."""

from __future__ import annotations

import torch
from torch import Tensor

from ..core.segments import wide
from ..core.terms import masked


def whitened(x: Tensor, tokens: Tensor, eps: float = 1e-8, count_eps: float = 1e-8) -> Tensor:
    """(x - mean) / sqrt(var + eps) with mean and unbiased variance over the tokens each entry stands for.

    x          values, any shape: one per token, or one per row where all tokens of a row carry the same
    tokens     how many tokens each entry stands for: a bool mask, or the lengths of the rows
    count_eps  the mean divides by N + count_eps; verl's 1e-8 leaves up to 1e-4 x / N of a batch of equal values
    returns    the shape of `x`; 0 for entries without tokens, and everywhere if the batch has fewer than two

    Entries without tokens may hold garbage.
    """
    one_each = tokens.dtype == torch.bool
    there = tokens if one_each else tokens > 0
    x = masked(wide(x), there)
    total = tokens.sum(dtype=torch.int32 if one_each else None).to(x.dtype)  # bools summed as int64 are slow

    def over_tokens(values: Tensor) -> Tensor:
        return (values if one_each else values * tokens).sum() / (total + count_eps)

    centred = masked(x - over_tokens(x), there)
    variance = over_tokens(centred.square()) * total / (total - 1).clamp(min=1)
    return torch.where(total > 1, centred / (variance + eps).sqrt(), torch.zeros_like(centred))
