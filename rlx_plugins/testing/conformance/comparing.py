"""The first difference between two outcomes, in words."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from .subject import Outcome

EXACT = 1e-9
"""Relative and absolute tolerance in float64, where only the order of sums differs."""


def first_difference(got: Outcome, want: Outcome, tokens: Tensor, tolerance: float = EXACT) -> str | None:
    """The first column or gradient of `got` that is not that of `want`; [B,T,...] ones count on `tokens` [B,T] only."""
    pairs = [(name, got.values.get(name), value) for name, value in want.values.items()]
    pairs += [
        (f"the gradient of {name.removeprefix('loss:')}", got.gradients.get(name), g)
        for name, g in want.gradients.items()
    ]
    for name, ours, theirs in pairs:
        if (found := difference(ours, theirs, tokens, tolerance)) is not None:
            return f"{name}{found}"
    return None


def difference(got: Any, want: Any, tokens: Tensor | None = None, tolerance: float = EXACT) -> str | None:
    """Where and how `got` differs from `want`, None if it does not; NaN equals NaN."""
    if isinstance(want, Tensor):
        return _of_tensors(got, want, tokens, tolerance)
    if isinstance(want, float) and isinstance(got, float):
        close = math.isclose(got, want, rel_tol=tolerance, abs_tol=tolerance) or (math.isnan(got) and math.isnan(want))
        return None if close else f": {got!r} instead of {want!r}"
    if isinstance(want, (list, tuple)) and isinstance(got, (list, tuple)) and len(got) == len(want):
        for i, (a, b) in enumerate(zip(got, want)):
            if (found := difference(a, b, tolerance=tolerance)) is not None:
                return f"[{i}]{found}"
        return None
    if isinstance(want, dict) and isinstance(got, dict) and got.keys() == want.keys():
        for name, value in want.items():
            if (found := difference(got[name], value, tolerance=tolerance)) is not None:
                return f"[{name!r}]{found}"
        return None
    return None if type(got) is type(want) and got == want else f": {got!r} instead of {want!r}"


def _of_tensors(got: Any, want: Tensor, tokens: Tensor | None, tolerance: float) -> str | None:
    if not isinstance(got, Tensor) or got.shape != want.shape:
        seen = tuple(got.shape) if isinstance(got, Tensor) else repr(got)
        return f" has shape {seen} instead of {tuple(want.shape)}"
    if want.dtype.is_floating_point:
        got, want = got.detach().to(torch.float64), want.detach().to(torch.float64)
        same = torch.isclose(got, want, rtol=tolerance, atol=tolerance, equal_nan=True)
    else:
        same = got == want
    if tokens is not None and want.shape[:2] == tokens.shape:
        same = same | ~tokens.reshape(tokens.shape + (1,) * (want.ndim - 2))
    if bool(same.all()):
        return None
    at = tuple((~same).nonzero()[0].tolist())
    place = f"[{', '.join(map(str, at))}]" if at else ""
    return f"{place}: {_number(got[at])} instead of {_number(want[at])}"


def _number(x: Tensor) -> str:
    return f"{x.item():.6g}" if x.dtype.is_floating_point else str(x.item())
