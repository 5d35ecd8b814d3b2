"""Normalisation over all tokens of the batch, as in verl's masked whitening."""

from __future__ import annotations

from torch import Tensor

from ..core.segments import wide
from ..core.terms import masked


def whitened(x: Tensor, tokens: Tensor, eps: float = 1e-8) -> Tensor:
    """(x - mean) / sqrt(var + eps) with mean and unbiased variance over the tokens each entry stands for.

    x       values, any shape: one per token, or one per row where all tokens of a row carry the same
    tokens  how many tokens each entry stands for: a bool mask, or the lengths of the rows
    returns the shape of `x`; 0 for entries without tokens, and everywhere if the batch has fewer than two

    Entries without tokens may hold garbage. The mean divides by N + 1e-8, as verl's does.
    """
    counts = tokens > 0
    x = masked(wide(x), counts)
    weight = tokens.to(x.dtype)
    total = weight.sum()
    mean = (weight * x).sum() / (total + 1e-8)
    centred = masked(x - mean, counts)
    variance = (weight * centred.square()).sum() / (total + 1e-8) * total / (total - 1).clamp(min=1)
    return masked(centred / (variance + eps).sqrt(), counts & (total > 1))
