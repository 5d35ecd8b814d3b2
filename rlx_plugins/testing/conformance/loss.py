"""Checks of the loss: no wait for the device, gradients that are the derivatives, constants that stay constants."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ...core.batch import RolloutBatch
from .numerics import on_accelerator
from .report import Failed, Skipped
from .subject import Hook, Subject

STEP = 1e-6
DIRECTIONS = 4
TOLERANCE = 1e-5
"""Finite differences of `STEP` in float64 along random directions, and how close the gradient must come to them."""


def no_host_sync(subject: Subject) -> None:
    """Nothing in the loss waits for the device."""
    for hook in subject.hooks_or_skip(in_loss=True):
        try:
            _, waits = on_accelerator(subject, hook)
        except Exception as error:  # the check `device` tells which
            raise Skipped("it does not run on an accelerator") from error
        if waits:
            more = f" and {len(waits) - 1} more" if len(waits) > 1 else ""
            raise Failed(
                "a loss that never waits for the device",
                waits[0] + more,
                "torch.where instead of if; metrics as tensors",
            )


def constants_detached(subject: Subject) -> None:
    """Advantages and metrics carry no gradient."""
    for hook in subject.hooks_or_skip(in_loss=True):
        values = subject.call(hook, subject.sample(hook)).values
        attached = [
            name
            for name, value in values.items()
            if isinstance(value, Tensor) and value.requires_grad and (name != "result" or hook.name == "in_loss")
        ]
        if attached:
            what = "the advantages" if hook.name == "in_loss" else f"the {attached[0]}"
            raise Failed("constants without gradient", f"{hook.name} returns {what} with one", "return x.detach()")


def gradient(subject: Subject) -> None:
    """The gradient of the token results is their derivative, with whatever is detached held fixed."""
    hooks = [h for h in subject.hooks_or_skip(in_loss=True) if h.name == "__call__"]
    if not hooks:
        raise Skipped("its hook in the loss makes constants")
    for hook in hooks:
        batch = subject.sample(hook)
        fixed = Fixed()
        with fixed:
            at = subject.call(hook, batch)
        if not any(bool((g != 0).any()) for g in at.gradients.values()):
            raise Failed("a result with gradient", f"{hook.name} has none anywhere", "leave one factor undetached")
        for name, g in at.gradients.items():
            found = _against_differences(subject, hook, batch, name, g, fixed)
            if found is not None:
                raise Failed(
                    f"the derivative with respect to {name.removeprefix('loss:')}",
                    found,
                    "make the result of tensor operations on terms.logp_new; .detach() what is meant as a constant",
                )


def _against_differences(
    subject: Subject, hook: Hook, batch: RolloutBatch, name: str, g: Tensor, fixed: Fixed
) -> str | None:
    generator = torch.Generator().manual_seed(2)
    there = torch.isfinite(batch[name])
    for _ in range(DIRECTIONS):
        direction = torch.where(there, torch.randn(g.shape, generator=generator, dtype=g.dtype), 0.0)
        totals = []
        for side in (STEP, -STEP):
            with fixed.again():
                moved = subject.call(hook, batch.with_columns(**{name: batch[name] + side * direction}))
            totals.append(0.0 if moved.total is None else float(moved.total.detach()))
        measured, claimed = (totals[0] - totals[1]) / (2 * STEP), float((g * direction).sum())
        if not abs(measured - claimed) <= TOLERANCE * max(1.0, abs(measured), abs(claimed)):  # NaN too
            return f"along a random direction {hook.name} changes by {measured:.6g}, its gradient says {claimed:.6g}"
    return None


class Fixed(TorchFunctionMode):
    """Holds constant what leaves the graph: detached values, comparisons, whatever is computed under no_grad.

    The first run records them in order, each run under `again` gets the recorded ones; so a finite difference sees the
    function whose gradient backward computes.
    """

    def __init__(self) -> None:
        super().__init__()
        self.recorded: list[Tensor] = []
        self.at: int | None = None
        self.off = False

    def again(self) -> Fixed:
        self.at = 0
        return self

    def __torch_function__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is torch._C._set_grad_enabled:
            self.off = not args[0]
            return out
        if not isinstance(out, Tensor) or out.requires_grad or not (torch.is_grad_enabled() or self.off):
            return out
        if not any(isinstance(x, Tensor) and x.requires_grad for x in (*args, *(kwargs or {}).values())):
            return out
        if self.at is None:
            self.recorded.append(out)
            return out
        if self.at == len(self.recorded) or self.recorded[self.at].shape != out.shape:
            raise RuntimeError("a second call made other operations than the first: the code branches on values")
        self.at += 1
        return self.recorded[self.at - 1]
