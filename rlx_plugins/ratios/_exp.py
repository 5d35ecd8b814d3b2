"""exp for importance ratios: an overflow does not poison the gradient of a token whose loss does not depend on it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class _Exp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        out = x.exp()
        ctx.save_for_backward(out)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (out,) = ctx.saved_tensors
        return torch.where(grad == 0, torch.zeros_like(grad), grad * out)


def exp(x: Tensor) -> Tensor:
    """exp(x), whose gradient is exactly 0 wherever the incoming gradient is 0, also where exp(x) overflows.

    `Tensor.exp` gives 0 * inf = NaN there, which a clipped token of an unbounded ratio runs into.
    """
    return _Exp.apply(x)
