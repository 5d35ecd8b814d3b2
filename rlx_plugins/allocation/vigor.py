"""VIGOR: more rollouts, round by round, for the prompts whose rewards vary most."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass

from ..core.context import Context
from ..core.errors import ConfigError
from ..core.kinds import Allocator
from ..core.params import param
from ..core.registry import register
from ..core.trajectory import Group, Rollout

ROUND = "vigor_round"
"""Entry of `group.extras`: the last round in which the group was active."""


@register("allocator", "vigor")
@dataclass
class Vigor(Allocator):
    """Every prompt gets a few rollouts; in each later round the share of the active prompts with the largest reward
    variance so far stays active and gets `growth` times as many new rollouts as in the round before.

    Round t: floor(first_wave * growth^t) rollouts per active prompt; then the max(1, floor(survivors * active)) prompts
    of the largest population variance over all their rewards go on, ties to the prompt that was started earlier. All
    rollouts are trained on: groups are of unequal size (defaults: 2, 6, 14, 30; 8 per prompt on average).

    Why variance: with advantages divided by the spread, a group's gradient grows with the spread of its rewards.

    A NaN reward counts as 0 in the ranking (and is unscorable in the update); a group without a finished rollout in its
    last round has variance 0. The decision ranks all groups of the step. No state: a step is self-contained.

    `total_rollouts`, the rounding and the order of ties are reconstructed.
    """

    paper = "VIGOR: VarIance Guided Online Rollout allocation, arXiv 2607.22002"
    scope = "batch"
    capabilities = frozenset({"rounds"})

    first_wave: int = param(2, ge=2, doc="rollouts per prompt in round 0, m_0; the paper's 2 (1 has no variance)")
    rounds: int = param(4, ge=1, doc="rounds, T; the paper's 4")
    survivors: float = param(0.5, gt=0, le=1, doc="share of the active prompts that go on, alpha; the paper's 0.5")
    growth: float = param(2.0, gt=0, doc="new rollouts relative to the round before, gamma; the paper's 2")
    total_rollouts: int | None = param(None, ge=1, doc="stop after so many rollouts of the step; None: unbounded")

    def more(self, idle: list[Group], ctx: Context) -> list[Rollout]:
        round_ = max((g.extras.get(ROUND, -1) for g in idle), default=-1)
        active = [g for g in idle if g.extras.get(ROUND, -1) == round_]
        if round_ + 1 >= self.rounds:
            return []
        if round_ >= 0:
            active = self._survivors(active)
        new: list[Rollout] = []
        for g in active:
            g.extras[ROUND] = round_ + 1
            new += g.start(self._wave(round_ + 1, ctx))
        ctx.log("allocator/vigor_rollouts", sum(len(g.rollouts) for g in ctx.started))
        return new

    def _survivors(self, active: list[Group]) -> list[Group]:
        """The prompts that go on, in the order they were started."""
        variance = [reward_variance(g) for g in active]
        ranked = sorted(range(len(active)), key=lambda i: -variance[i])
        keep = max(1, math.floor(self.survivors * len(active)))
        return [active[i] for i in sorted(ranked[:keep])]

    def _wave(self, round_: int, ctx: Context) -> int:
        """New rollouts of the next active prompt."""
        size = float(self.first_wave)
        for _ in range(round_):
            size *= self.growth
        if self.total_rollouts is None:
            return math.floor(size)
        return min(math.floor(size), max(0, self.total_rollouts - sum(len(g.rollouts) for g in ctx.started)))

    def planned_per_prompt(self) -> float:
        """Rollouts per prompt if the shares of the rounds are whole numbers: m_0 * sum_t (alpha gamma)^t."""
        return self.first_wave * sum((self.survivors * self.growth) ** t for t in range(self.rounds))

    def predicted_efficiency(self, pareto_index: float) -> float:
        """Expected gain over a uniform allocation when the groups' variances follow a Pareto law of this index (> 1).

        The predicted ratio of iterations is its cube root.
        """
        if pareto_index <= 1:
            raise ConfigError(f"allocator vigor: the Pareto index must be above 1, got {pareto_index}")
        gain = self.growth * self.survivors ** (1 - 1 / pareto_index)
        rounds = range(self.rounds)
        return sum(gain**t for t in rounds) / sum((self.growth * self.survivors) ** t for t in rounds)


def reward_variance(group: Group) -> float:
    """Population variance of all rewards of the group so far; 0 if its last wave brought none.

    Free of rounding: equal variances are ties, whatever the rewards and their order.
    """
    if not any(r.state == "finished" for r in group.wave()):
        return 0.0
    return statistics.pvariance(0.0 if math.isnan(reward) else reward for reward in group.rewards())
