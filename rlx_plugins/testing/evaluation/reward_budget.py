"""Function forms of rewards by token budget and by nearness to the right number."""

from __future__ import annotations

from typing import Any

import torch

from ...core.registry import create
from .building import reward_batch, tensor

Result = dict[str, Any]


def hbpo(
    correct, length, budget, beta=1.0, alpha=1e-4, l_max=4096, scale=None, overrun_coef=None, max_length=None
) -> Result:
    """`length` [B] in tokens."""
    lengths = tensor(length).long()
    mask = torch.arange(max([1, *lengths.tolist()])) < lengths[:, None]
    part = create(
        "reward",
        "hbpo",
        scale=beta if scale is None else scale,
        overrun_coef=alpha if overrun_coef is None else overrun_coef,
        max_length=l_max if max_length is None else max_length,
    )
    columns = part(reward_batch(response_mask=mask.double(), correct=tensor(correct), budget=tensor(budget)))
    return {"rewards": columns["rewards"], "baseline": columns["budget_baseline"]}


def cadence(correct, predicted, target, r_max=0.5, rel_tol=0.5, floor=1.0, max_partial=None, tolerance=None) -> Result:
    """`predicted`, `target`: numbers, or None; one target may stand for all rows."""
    judged = tensor(correct)
    part = create(
        "reward",
        "cadence",
        max_partial=r_max if max_partial is None else max_partial,
        tolerance=rel_tol if tolerance is None else tolerance,
        floor=floor,
    )
    columns = part(
        reward_batch(
            torch.zeros_like(judged),
            correct=judged,
            predicted=tensor(predicted),
            target=tensor(target).expand_as(judged),
        )
    )
    return {
        "reward": columns["rewards"],
        "rewards": columns["rewards"],
        "nonzero_fraction": columns["nonzero_share"],
    }


FORMS = {form.__name__: form for form in (hbpo, cadence)}
