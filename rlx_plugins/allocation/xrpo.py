"""XRPO: after a base phase, each further rollout goes where it narrows the confidence interval of the reward most."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass

import torch

from ..core.context import Context
from ..core.errors import ConfigError, DataError
from ..core.kinds import Allocator
from ..core.params import param
from ..core.registry import register
from ..core.trajectory import Group, Rollout
from ._student import two_sided_quantile

ROUND = "xrpo_round"
"""Entry of `group.extras`: rounds after the base phase that the group has seen, with rollouts for it or without."""


@register("allocator", "xrpo")
@dataclass
class XRPO(Allocator):
    """Every prompt gets a few base rollouts; the rest of the step's budget is given out in rounds, one rollout after
    the other, to the prompt with the largest expected narrowing of its interval plus a bonus for rarely sampled ones.

    For a prompt with n rollouts and sample standard deviation s of their rewards, and T rollouts in the step so far:
    h(n) = t_{1 - outside/2, n-1} s / sqrt(n);   priority = h(n) - h(n+1) + bonus_coef sqrt(ln(1+T) / n).
    Inside a round n and T grow with every assigned rollout while s waits for the rewards; ties go to the prompt that
    was started earlier. All rollouts are trained on: groups are of unequal size.

    A NaN reward does not enter s but counts in n. Where all rewards of a prompt agree only the bonus acts. Prompts
    without a positive reward are counted in the logs; `hint: xrpo` seeds their further rollouts (`method: xrpo`).

    Reconstructed: the base of 4, outside, bonus_coef, the split of the budget over rounds, T, the order of ties.
    """

    paper = "XRPO: eXplore - eXploit GRPO, arXiv 2510.06672"
    scope = "batch"
    capabilities = frozenset({"rounds"})

    first_wave: int = param(4, ge=2, doc="base rollouts of every prompt; reconstructed (1 has no interval)")
    rounds: int = param(2, ge=1, doc="rounds the rest of the budget is given out in; reconstructed")
    total_rollouts: int | None = param(None, ge=1, doc="rollouts of the step; None: group_size per prompt")
    max_per_prompt: int | None = param(None, ge=2, doc="rollouts of a prompt; None: unbounded")
    outside: float = param(0.05, gt=0, lt=1, doc="probability outside the interval; reconstructed")
    bonus_coef: float = param(0.1, ge=0, doc="weight of the bonus for few rollouts, lambda; reconstructed")

    def check(self) -> None:
        if self.max_per_prompt is not None and self.max_per_prompt < self.first_wave:
            raise ConfigError(
                f"allocator xrpo.max_per_prompt: must be >= first_wave ({self.first_wave}), got {self.max_per_prompt}"
            )

    def more(self, idle: list[Group], ctx: Context) -> list[Rollout]:
        base = [r for g in idle if not g.rollouts for r in g.start(self.base(g))]
        if base:
            return base
        drawn = sum(len(g.rollouts) for g in ctx.started)
        ctx.log("allocator/xrpo_rollouts", drawn)
        ctx.log("allocator/xrpo_zero_reward", sum(not has_positive_reward(g) for g in idle))
        new: list[Rollout] = []
        for round_ in range(max((g.extras.get(ROUND, 0) for g in idle), default=self.rounds), self.rounds):
            for g in idle:
                g.extras[ROUND] = round_ + 1
            added = self.assign(idle, self.budget(round_, drawn, ctx), drawn)
            new = [r for g, n in zip(idle, added, strict=True) for r in g.start(n)]
            if new:
                break
        return new

    def base(self, group: Group) -> int:
        """Rollouts of the base phase."""
        return self.first_wave

    def budget(self, round_: int, drawn: int, ctx: Context) -> int:
        """Rollouts of a round: the rest of the step's, shared equally with the rounds to come."""
        total = ctx.group_size * len(ctx.started) if self.total_rollouts is None else self.total_rollouts
        return max(0, math.ceil((total - drawn) / (self.rounds - round_)))

    def assign(self, groups: list[Group], budget: int, drawn: int) -> list[int]:
        """How many of `budget` further rollouts each group gets, `drawn` having been drawn in the step before."""
        spread = [reward_std(g) for g in groups]
        n = torch.tensor([len(g.rollouts) for g in groups], dtype=torch.float64)
        narrowing = torch.tensor([self.narrowing(int(k), s) for k, s in zip(n, spread)], dtype=torch.float64)
        if self.max_per_prompt is not None:
            narrowing[n >= self.max_per_prompt] = -torch.inf
        added = [0] * len(groups)
        for total in range(drawn, drawn + budget):
            priority = narrowing + self.bonus(n, total)
            i = int(priority.argmax())
            if priority[i] == -torch.inf:
                break
            added[i] += 1
            n[i] += 1
            full = self.max_per_prompt is not None and n[i] >= self.max_per_prompt
            narrowing[i] = -torch.inf if full else self.narrowing(int(n[i]), spread[i])
        return added

    def priorities(self, groups: list[Group], drawn: int) -> list[float]:
        """The priority of each group for the next rollout."""
        n = torch.tensor([len(g.rollouts) for g in groups], dtype=torch.float64)
        narrowing = torch.tensor([self.narrowing(len(g.rollouts), reward_std(g)) for g in groups], dtype=torch.float64)
        return (narrowing + self.bonus(n, drawn)).tolist()

    def narrowing(self, n: int, std: float) -> float:
        """h(n) - h(n+1): by how much one more rollout narrows half the interval, at the spread `std`."""
        if n < 2:
            raise DataError("allocator xrpo: a prompt needs two rollouts before its interval can be estimated")
        return 0.0 if std == 0 else self._half_width(n, std) - self._half_width(n + 1, std)

    def bonus(self, n: torch.Tensor, drawn: int) -> torch.Tensor:
        """[G]: the bonus of prompts with n [G] rollouts each, `drawn` in the whole step."""
        return self.bonus_coef * (math.log1p(drawn) / n).sqrt()

    def _half_width(self, n: int, std: float) -> float:
        return two_sided_quantile(self.outside, n - 1) * std / math.sqrt(n)


def has_positive_reward(group: Group) -> bool:
    """Whether any rollout of the group has one."""
    return any(x > 0 for x in group.rewards())


def reward_std(group: Group) -> float:
    """Sample standard deviation of the group's rewards (ddof 1) without NaN; 0 for fewer than two.

    Free of rounding: rewards that all agree have 0, and equal spreads are ties.
    """
    rewards = [x for x in group.rewards() if not math.isnan(x)]
    return statistics.stdev(rewards) if len(rewards) > 1 else 0.0
