"""CoBA-RL: the step's budget goes to easy prompts while the model is weak, and to hard ones as it grows stronger."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ..core.context import Context
from ..core.errors import ConfigError, DataError
from ..core.kinds import Allocator
from ..core.params import param
from ..core.registry import register
from ..core.state import state
from ..core.trajectory import Group, Rollout
from ._greedy import greedy


class Capability(NamedTuple):
    """What the failure rates so far say: this step's, the average, the effective one, and the density's exponents."""

    failure_now: float
    failure_avg: float
    failure_eff: float
    alpha: float
    beta: float


@register("allocator", "coba")
@dataclass
class CoBA(Allocator):
    """Before anything is generated, the step's rollouts are given out one by one to the prompt where one more is worth
    most; a rollout's worth is largest at a pass rate that moves from easy to hard as the model's failure rate falls.

    With last known pass rates p_i of the step's prompts (`unseen` for new ones) and F the mean of 1 - mean(p) over the
    last `window` steps: F' = F if F > 1/2, else 1 / (1 + exp(-sharpness (F - 1/2)));
    alpha = clip(alpha_min + failure_weight F', alpha_min, alpha_max);   beta = concentration - alpha;
    V_i(B) = (1 - exp(-B p_i (1 - p_i) / saturation)) Beta(p_i; alpha, beta).
    Greedy by V_i(B+1) - V_i(B), which is exact since V is concave in B; ties go to the prompt that was started earlier.

    A prompt whose pass rate is 0 or 1 keeps `min_per_prompt` rollouts, enough for the rate to move again. Groups are of
    unequal size. After the step p_i is the share of its scorable rollouts above `success_threshold`.

    Reconstructed: failure_weight, alpha_min, alpha_max, saturation, window and unseen.
    """

    paper = "CoBA-RL, arXiv 2602.03048"

    total_rollouts: int | None = param(None, ge=1, doc="rollouts of the step; None: group_size per prompt")
    min_per_prompt: int = param(2, ge=0, doc="rollouts of a prompt at least, B_low; the paper's 2")
    max_per_prompt: int = param(128, ge=1, doc="rollouts of a prompt at most, B_up; the paper's 128")
    concentration: float = param(11.0, gt=2, doc="alpha + beta of the density, kappa; the paper's 11")
    alpha_min: float = param(1.0, gt=0, doc="least alpha of the density; reconstructed")
    alpha_max: float = param(10.0, gt=0, doc="largest alpha of the density; reconstructed")
    failure_weight: float = param(9.0, ge=0, doc="of the failure rate in alpha, lambda; reconstructed")
    sharpness: float = param(10.0, gt=0, doc="of the fall of alpha below a failure rate of 1/2, gamma; the paper's 10")
    saturation: float = param(4.0, gt=0, doc="rollouts after which more are worth less, tau; reconstructed")
    window: int = param(10, ge=1, doc="steps the failure rate is averaged over; reconstructed")
    unseen: float = param(0.5, ge=0, le=1, doc="pass rate of a prompt never tried; reconstructed")
    success_threshold: float = param(0.5, doc="a rollout succeeded if its reward is above it")

    pass_rates: dict = state(factory=dict)
    failures: list = state(factory=list)
    step: int = state(-1)

    def check(self) -> None:
        if not self.alpha_min <= self.alpha_max < self.concentration:
            raise ConfigError(
                f"allocator coba.alpha_max: must be >= alpha_min ({self.alpha_min:g}) and < concentration"
                f" ({self.concentration:g}), got {self.alpha_max:g}"
            )
        if self.min_per_prompt > self.max_per_prompt:
            raise ConfigError(
                f"allocator coba.min_per_prompt: must be <= max_per_prompt ({self.max_per_prompt}),"
                f" got {self.min_per_prompt}"
            )

    def more(self, idle: list[Group], ctx: Context) -> list[Rollout]:
        new = [g for g in idle if not g.rollouts]
        if not new:
            return []
        rates = [self.pass_rates.get(g.prompt_key, self.unseen) for g in new]
        capability = self.capability(rates, ctx.step)
        total = ctx.group_size * len(new) if self.total_rollouts is None else self.total_rollouts
        counts = self.allocate(rates, total, capability)
        ctx.log("allocator/coba_alpha", capability.alpha)
        ctx.log("allocator/coba_unspent", total - sum(counts))
        return [r for g, n in zip(new, counts, strict=True) for r in g.start(n)]

    def observe(self, groups: list[Group], ctx: Context) -> None:
        for g in groups:
            rate = g.success_rate(self.success_threshold)
            if rate is not None:
                self.pass_rates[g.prompt_key] = rate

    def capability(self, rates: Sequence[float], step: int) -> Capability:
        """What the failure rates say at `step`; that of the step enters the history once."""
        now = 1 - sum(rates) / len(rates)
        if step != self.step:
            self.step, self.failures = step, [*self.failures, now][-self.window :]
        average = sum(self.failures) / len(self.failures)
        effective = average if average > 0.5 else 1 / (1 + math.exp(-self.sharpness * (average - 0.5)))
        alpha = min(max(self.alpha_min + self.failure_weight * effective, self.alpha_min), self.alpha_max)
        return Capability(now, average, effective, alpha, self.concentration - alpha)

    def allocate(self, rates: Sequence[float], total: int, capability: Capability) -> list[int]:
        """Rollouts of each prompt."""
        counts = [self.min_per_prompt] * len(rates)
        left = total - sum(counts)
        if left < 0:
            raise DataError(
                f"allocator coba: {total} rollouts are fewer than min_per_prompt={self.min_per_prompt} for each of"
                f" {len(rates)} prompts; raise total_rollouts or group_size, or lower min_per_prompt"
            )

        def gain(i: int, n: int) -> float:
            return self.value(rates[i], n + 1, capability) - self.value(rates[i], n, capability)

        return greedy(gain, counts, self.max_per_prompt, left, least=-math.inf)

    def value(self, rate: float, n: int, capability: Capability) -> float:
        """V(n): what n rollouts of a prompt are worth."""
        gain = -math.expm1(-n * rate * (1 - rate) / self.saturation)
        return gain * beta_density(rate, capability.alpha, capability.beta) if gain else 0.0


def beta_density(p: float, alpha: float, beta: float) -> float:
    """The density of Beta(alpha, beta) at p in [0, 1]."""
    log_norm = math.lgamma(alpha) + math.lgamma(beta) - math.lgamma(alpha + beta)
    total = -log_norm
    for x, exponent in ((p, alpha - 1), (1 - p, beta - 1)):
        if x > 0:
            total += exponent * math.log(x)
        elif exponent != 0:
            return 0.0 if exponent > 0 else math.inf
    return math.exp(total)
