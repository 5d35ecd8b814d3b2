"""Function forms of the reward shapers."""

from __future__ import annotations

from typing import Any

from ...core.registry import create
from .building import reward_batch
from .reward_budget import FORMS as BUDGET_FORMS
from .reward_group import FORMS as GROUP_FORMS

Result = dict[str, Any]


def alp(
    correct,
    group,
    response_mask,
    beta=1e-7,
    length_unit=1.0,
    floor="inverse_k",
    penalty_coef=None,
    success_threshold=0.5,
) -> Result:
    part = create(
        "reward",
        "alp",
        penalty_coef=beta if penalty_coef is None else penalty_coef,
        length_unit=length_unit,
        floor=floor,
        success_threshold=success_threshold,
    )
    columns = part(reward_batch(group=group, response_mask=response_mask, correct=correct))
    return {
        "rewards": columns["rewards"],
        "solve_rate": columns["solve_rate"],
        "coefficient": columns["length_coefficient"],
        "penalty": columns["length_penalty"],
    }


def lead(
    correct,
    group,
    response_mask,
    mode="max_sym",
    aggregator="mean_correct",
    l_min=1000,
    l_max=8000,
    short_guard=500,
    min_target=None,
    max_target=None,
    success_threshold=0.5,
) -> Result:
    part = create(
        "reward",
        "lead",
        mode=mode,
        aggregator=aggregator,
        min_target=l_min if min_target is None else min_target,
        max_target=l_max if max_target is None else max_target,
        short_guard=short_guard,
        success_threshold=success_threshold,
    )
    columns = part(reward_batch(group=group, response_mask=response_mask, correct=correct))
    components = columns["reward_components"]
    return {"components": components, "efficiency": components[:, 1], "target_len": columns["target_length"]}


FORMS = {form.__name__: form for form in (alp, lead)} | BUDGET_FORMS | GROUP_FORMS
