"""V_0.5's rollout budget: a handful of rollouts test a value prior, and more are drawn only while it looks wrong."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from ..core.context import Context
from ..core.errors import ConfigError, DataError
from ..core.kinds import Allocator
from ..core.params import param
from ..core.registry import register
from ..core.trajectory import Group, Rollout

Stop = Literal["prior_ok", "no_gain", "cap", "no_prior"]


@register("allocator", "v05")
@dataclass
class V05(Allocator):
    """A prompt gets `first_wave` rollouts; if their mean reward agrees with a value model's prior within noise, that is
    all. If not, one more at a time is drawn while it would lower the error of the fused baseline by more than `cost`.

    On rewards scaled to [-1, 1], with mean m of n scorable rollouts and prior V:
    D2 = max(0, (m - V)^2 - 1/n);   MSE(n) = D2 / (n D2 + 1);   another rollout while MSE(n) - MSE(n+1) > cost.

    The prior is the dataset column `prior`, one number per prompt on the scale of the rewards, clipped to
    [reward_min, reward_max] (None or NaN: none, and the prompt keeps its first rollouts). Rollouts that were lost or
    can't be scored count against `max_per_prompt` only. `advantage: v05` fuses the baseline (`method: v05`).

    The paper draws one rollout at a time; `wave` draws several between two looks, which hides latency.
    """

    paper = "V_0.5: Generalist Value Model as a Prior for Sparse RL Rollouts, arXiv 2603.10848"
    capabilities = frozenset({"rounds"})

    prior: str = param("value_prior", doc="dataset column with the value model's guess")
    first_wave: int = param(4, ge=3, doc="rollouts of every prompt; the paper's 4 (1 and 2 diverge)")
    max_per_prompt: int = param(16, ge=3, doc="rollouts of a prompt; the paper's 16")
    cost: float = param(1 / 256, ge=0, doc="drop in squared error a rollout must be worth; the paper's 0.0039")
    wave: int = param(1, ge=1, doc="rollouts between two looks; the paper's 1")
    reward_min: float = param(-1.0, doc="lowest reward; the paper's -1")
    reward_max: float = param(1.0, doc="highest reward; the paper's +1")

    def check(self) -> None:
        if self.reward_min >= self.reward_max:
            raise ConfigError(
                f"allocator v05.reward_min: must be below reward_max ({self.reward_max:g}), got {self.reward_min:g}"
            )
        if self.first_wave > self.max_per_prompt:
            raise ConfigError(
                f"allocator v05.first_wave: must be <= max_per_prompt ({self.max_per_prompt}), got {self.first_wave}"
            )

    @property
    def requires(self) -> frozenset[str]:
        return frozenset({self.prior})

    def more(self, idle: list[Group], ctx: Context) -> list[Rollout]:
        new: list[Rollout] = []
        for g in idle:
            if not g.rollouts:
                new += g.start(self.first_wave)
            elif self.stop(g) is None:
                new += g.start(min(self.wave, self.max_per_prompt - len(g.rollouts)))
        ctx.log("allocator/v05_rollouts", sum(len(g.rollouts) for g in ctx.started))
        return new

    def stop(self, group: Group) -> Stop | None:
        """Why the group is complete; None: it gets further rollouts."""
        prior = self.prior_of(group)
        rewards = [self._scaled(r.reward) for r in group.rollouts if r.scorable and r.reward is not None]
        if math.isnan(prior) or not rewards:
            return "no_prior"
        if len(group.rollouts) >= self.max_per_prompt:
            return "cap"
        error = prior_error(rewards, self._scaled(min(max(prior, self.reward_min), self.reward_max)))
        if error == 0:
            return "prior_ok"
        n = len(rewards)
        return None if baseline_error(error, n) - baseline_error(error, n + 1) > self.cost else "no_gain"

    def prior_of(self, group: Group) -> float:
        """The value model's guess for the group's prompt; NaN where it has none."""
        given = group.extras.get(self.prior)
        if given is not None and (isinstance(given, bool) or not isinstance(given, (int, float))):
            raise DataError(
                f"allocator v05: column {self.prior!r} of prompt {group.prompt_key!r} must be a number or None,"
                f" got {given!r}"
            )
        return math.nan if given is None else float(given)

    def _scaled(self, reward: float) -> float:
        """On [-1, 1]."""
        middle, half = (self.reward_max + self.reward_min) / 2, (self.reward_max - self.reward_min) / 2
        return (reward - middle) / half


def prior_error(rewards: Sequence[float], prior: float) -> float:
    """D2: squared bias of the prior beyond the noise 1/n of the mean of n rewards in [-1, 1]."""
    n = len(rewards)
    return max(0.0, (sum(rewards) / n - prior) ** 2 - 1 / n)


def baseline_error(error: float, n: int) -> float:
    """MSE(n): expected squared error of the fused baseline after n rollouts, for a prior of squared bias `error`."""
    return error / (n * error + 1)
