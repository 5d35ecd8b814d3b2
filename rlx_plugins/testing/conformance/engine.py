"""Checks of what lives in an engine or a model: drafters and quantisation."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from .report import Failed, Skipped
from .subject import Subject

ROWS: list[dict[str, Any]] = [
    {"row_key": f"r{i}", "prompt": [7, 8], "tokens": [i % 3, 1, 2, 1, 2, i % 3, 1, 2], "logp": [-0.5] * 8}
    for i in range(4)
]
"""Finished rows with repetitions, so that a drafter has something to propose."""


def drafts(subject: Subject) -> None:
    """At most k token ids, the same ones when asked again, by another instance too that has observed the same."""
    if subject.kind != "drafter":
        raise Skipped("it drafts nothing")
    found = []
    for _ in range(2):
        part = subject.setting.part()
        part.observe(ROWS)
        row = ROWS[0]["prompt"] + ROWS[0]["tokens"][:5]
        for k in (0, 1, 4):
            given = list(row)
            proposed = part.draft("r0", given, 2, k)
            if len(proposed) > k or not all(isinstance(token, int) for token in proposed):
                raise Failed(
                    f"at most {k} ints", repr(proposed), "cut the draft to k, and convert tensors with tolist()"
                )
            if given != row:
                raise Failed("the tokens as they were", repr(given), "copy the list before appending to it")
            found.append(proposed)
        part.end_rollout()
    if found[:3] != found[3:]:
        raise Failed(
            "the same drafts from the same rows", f"{found[3:]} after {found[:3]}", "draw with a hash of row_key"
        )


def wraps_a_model(subject: Subject) -> None:
    """The wrapped model has outputs of the same shape, finite, and gradients for the model's own parameters."""
    if subject.kind != "quant":
        raise Skipped("it wraps no model")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64))
    x = torch.randn(8, 64)
    shape = model(x).shape
    parameters = list(model.parameters())
    out = subject.setting.part().wrap(model)(x)
    if out.shape != shape or not bool(torch.isfinite(out).all()):
        raise Failed(f"finite outputs of shape {tuple(shape)}", f"{tuple(out.shape)}", "replace layers one for one")
    out.square().sum().backward()
    without = [p for p in parameters if p.grad is None or not (bool(p.grad.isfinite().all()) and bool(p.grad.any()))]
    if without:
        raise Failed(
            "finite gradients for every parameter of the model",
            f"{len(without)} of {len(parameters)} have none",
            "round in the forward pass only (straight-through), and keep the parameters in place",
        )
