"""Checks of number formats and devices: results agree with float64, and live where the batch does."""

from __future__ import annotations

import torch
from torch import Tensor

from ...core.batch import RolloutBatch
from .accelerator import Remote, accelerator, fetched, put
from .comparing import first_difference
from .report import Failed
from .subject import Hook, Outcome, Subject

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.1}
"""Largest difference from float64 on the same numbers, relative and absolute."""


def precision(subject: Subject) -> None:
    """In float32 and bfloat16 results agree with float64 on the same numbers, and are no wider than float32.

    Gradients in bfloat16 need only be finite.
    """
    for hook in subject.hooks_or_skip():
        batch = cast(cast(subject.sample(hook), torch.bfloat16), torch.float64)
        want = _floats(subject.call(hook, batch))
        tokens = subject.tokens(subject.part(), batch)
        for dtype, tolerance in TOLERANCE.items():
            got = _floats(subject.call(hook, cast(batch, dtype)))
            allowed = {dtype, torch.float32}
            for name, column in got.values.items():
                if isinstance(column, Tensor) and column.dtype not in allowed:
                    raise Failed(
                        f"results of {dtype} inputs in {dtype} or float32",
                        f"{hook.name} returns {name} in {column.dtype}",
                        "make tensors with dtype=batch.dtype, or x.to(like.dtype)",
                    )
            if dtype == torch.bfloat16:
                _check_finite(hook, got, tokens)
                got.gradients = want.gradients  # they jump where rounding moves a token over an edge
            if (found := first_difference(got, want, tokens, tolerance)) is not None:
                raise Failed(
                    f"results within {tolerance:g} of float64",
                    f"in {dtype}, {hook.name} gives {found}",
                    "compute sums, means and exponentials in float32 at least (core.segments.wide)",
                )


def cast(batch: RolloutBatch, dtype: torch.dtype) -> RolloutBatch:
    """The batch with its float columns in `dtype`."""
    floats = {n: x.to(dtype) for n, x in batch.items() if isinstance(x, Tensor) and x.dtype.is_floating_point}
    return batch.with_columns(**floats)


def device(subject: Subject) -> None:
    """It runs where the batch is: tensors it makes are on the batch's device, and so are its results."""
    for hook in subject.hooks_or_skip():
        batch = subject.sample(hook)
        got, _ = on_accelerator(subject, hook)
        elsewhere = [n for n, x in got.values.items() if isinstance(x, Tensor) and x.ndim and not isinstance(x, Remote)]
        if elsewhere:
            raise Failed(
                "results on the batch's device",
                f"{hook.name} returns {elsewhere[0]} on the CPU",
                "make tensors with device=batch.device",
            )
        local = Outcome(fetched(got.values), fetched(got.gradients))
        found = first_difference(local, subject.call(hook, batch), subject.tokens(subject.part(), batch))
        if found is not None:
            raise Failed(
                "the results of the CPU", f"on an accelerator, {hook.name} gives {found}", "ask for no device by name"
            )


def on_accelerator(subject: Subject, hook: Hook) -> tuple[Outcome, list[str]]:
    """The hook called on a batch on the pretended accelerator, and the waits for it."""
    batch, part = subject.sample(hook), subject.part()
    with accelerator() as waits:
        return subject.call(hook, batch.with_columns(**put(batch)), part), waits


def _check_finite(hook: Hook, got: Outcome, tokens: Tensor) -> None:
    for name, gradient in got.gradients.items():
        if not bool(torch.isfinite(gradient[tokens]).all()):
            raise Failed(
                "finite gradients",
                f"in bfloat16, {hook.name} has a gradient of {name.removeprefix('loss:')} that is not",
                "bound exponents before exp()",
            )


def _floats(outcome: Outcome) -> Outcome:
    """The outcome without columns that are not floats: labels and counts may follow a rounding."""
    values = {n: x for n, x in outcome.values.items() if isinstance(x, Tensor) and x.dtype.is_floating_point}
    return Outcome(values, outcome.gradients)
