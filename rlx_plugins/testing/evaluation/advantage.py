"""Function forms of the advantage estimators."""

from __future__ import annotations

from typing import Any

from ...core.registry import create
from .building import per_row, reward_batch

Result = dict[str, Any]


def grpo(rewards, group, scale="group", eps=1e-6, ddof=1, singleton="raw", response_mask=None, host=None) -> Result:
    batch = reward_batch(rewards, group, response_mask)
    part = create("advantage", "grpo", scale=scale, eps=eps, ddof=ddof, singleton=singleton, host=host)
    return {"advantages": per_row(part(batch)["advantages"], response_mask)}


FORMS = {"grpo": grpo}
