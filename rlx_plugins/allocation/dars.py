"""DARS: a second stage of rollouts for hard prompts, until their advantages weigh as much as a medium prompt's."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from ..core.context import Context
from ..core.kinds import Allocator
from ..core.params import param
from ..core.registry import register
from ..core.trajectory import Group, Rollout

CAP = {"ET": 32, "HW": 64}
"""Largest group of each schedule in the released code."""


@register("allocator", "dars")
@dataclass
class DARS(Allocator):
    """After a first stage, prompts solved by fewer than half of their rollouts get as many more as bring the sum of
    their absolute advantages to that of a medium prompt (equal treatment, ET), or beyond, the harder they are (HW).

    With accuracy a of N finished rollouts, u = a, or 0.5/N where nothing succeeded; for u < 1/2:
    S(u) = 2 u (1-u), P = N/2;  or with use_std S(u) = 2 sqrt(u (1-u)), P = N;
    extra = ceil((target - N S(u)) / S(u)), with target = P (ET) or 2 (1-u) P (HW), up to max_per_prompt rollouts.

    Both stages make one group, trained only if 0 < mean reward < upper_threshold. Rewards above `success_threshold` are
    successes for the allocation alone. Lost rollouts and NaN rewards are not counted.

    `use_std` says what the advantage does: `advantage: {name: grpo, scale: none}` is the released code's (False), GRPO
    divides by the spread (True). The second stage samples like the first; the released call that does not is taken for
    an error. The size of the second stage depends on the first's outcome, so that the pooled mean is slightly biased.
    """

    paper = "Depth-Breadth Synergy in RLVR (DARS), arXiv 2508.13755"
    capabilities = frozenset({"rounds"})

    first_wave: int = param(8, ge=1, doc="rollouts of every prompt, N; the code's 8")
    max_per_prompt: int | None = param(None, ge=1, doc="rollouts of a prompt; None: the code's 32 (ET) or 64 (HW)")
    schedule: Literal["ET", "HW"] = param("ET", doc="equal treatment, or hardness-weighted")
    use_std: bool = param(False, doc="the advantage divides by the group's spread; the code's False")
    upper_threshold: float = param(1.0, gt=0, doc="mean reward from which a group is not trained; the code's 1")
    success_threshold: float = param(0.5, doc="a rollout succeeded if its reward is above it")

    def more(self, idle: list[Group], ctx: Context) -> list[Rollout]:
        new: list[Rollout] = []
        for g in idle:
            if not g.rollouts:
                new += g.start(self.first_wave)
            elif all(r.wave == 0 for r in g.rollouts):
                new += g.start(self.extra(g))
        ctx.log("allocator/dars_rollouts", sum(len(g.rollouts) for g in ctx.started))
        return new

    def complete(self, group: Group, ctx: Context) -> None:
        if not self.trained(group):
            group.rollouts = []
            ctx.log("allocator/dars_dropped", ctx.metrics.get("allocator/dars_dropped", 0.0) + 1)

    def extra(self, group: Group) -> int:
        """Rollouts of the second stage."""
        accuracy = group.success_rate(self.success_threshold)
        if accuracy is None:
            return 0
        n = sum(r.scorable for r in group.rollouts)
        u = accuracy if accuracy > 1e-6 else 0.5 / n
        if u >= 0.5:
            return 0
        mass, peak = (2 * math.sqrt(u * (1 - u)), n) if self.use_std else (2 * u * (1 - u), n / 2)
        target = peak if self.schedule == "ET" else 2 * (1 - u) * peak
        cap = CAP[self.schedule] if self.max_per_prompt is None else self.max_per_prompt
        return min(max(math.ceil((target - n * mass) / mass - 1e-9), 0), max(cap - n, 0))

    def trained(self, group: Group) -> bool:
        """Whether the group's mean reward lies between 0 and the threshold."""
        rewards = [x for x in group.rewards() if not math.isnan(x)]
        return bool(rewards) and 0 < sum(rewards) / len(rewards) < self.upper_threshold
