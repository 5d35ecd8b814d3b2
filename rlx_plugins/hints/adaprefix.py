"""AdaPrefix-GRPO: as much of a correct solution before the answer as keeps the success rate near one half."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass

from ..core.context import Context
from ..core.errors import ConfigError
from ..core.kinds import Hint
from ..core.params import param
from ..core.registry import register
from ..core.state import state
from ..core.trajectory import Group, Rollout, Segment
from ._columns import column_tokens


@register("hint", "adaprefix")
@dataclass
class AdaPrefix(Hint):
    """The beginning of a reference solution stands before the answer, its share steered towards the success rate 1/2.

    A level shared by all prompts carries what all need, an offset per prompt the deviation; near the end of training
    the help is faded out, so that the model is trained on the bare prompt.

    share_i(t) = envelope(t) * clip(level + offset_i, 0, max_share);  prefix = floor(share * L), at most L - 1 tokens.
    Every `interval` steps, over the prompts seen since, with e_i = target - (moving average of the success rate of i):
    level += gain_global * mean e;  offset_i += gain_local * (e_i - mean e).

    Prefix tokens are a "hint" segment: outside response_mask, in `hint_mask`. With `imitate` they are inside both, and
    trained like the model's own, as far as `selector: adhint` lets them. Success is the groups' rate of rewards
    above `success_threshold`, weighted by 1/propensity; several groups of a prompt in one step count as one, with their
    mean rate.

    Reconstructed where the paper's text was not at hand: gains, bounds, and the linear fading. Deviation: a prefix
    leaves at least one of the response's max_tokens to the model.
    """

    paper = "Max Out GRPO Signal: Adaptive Trace Prefix Control, arXiv 2607.07674"
    capabilities = frozenset({"continue"})

    column: str = param("solution", doc="dataset column of the reference solution")
    target: float = param(0.5, gt=0, lt=1, doc="success rate aimed at; the paper's 0.5")
    interval: int = param(10, ge=1, doc="steps between adaptations; the paper's 10")
    decay: float = param(0.5, ge=0, lt=1, doc="weight of the old value in the moving average of the success rate")
    gain_global: float = param(0.25, ge=0, doc="step of the shared level per unit of error")
    gain_local: float = param(0.25, ge=0, doc="step of a prompt's offset per unit of its own error")
    initial_share: float = param(0.5, ge=0, lt=1, doc="share of the solution given at first")
    max_share: float = param(0.9, ge=0, lt=1, doc="bound on the share")
    withdraw_start: float = param(0.7, ge=0, le=1, doc="share of the run after which help is faded out")
    withdraw_end: float = param(0.9, ge=0, le=1, doc="share of the run after which there is none")
    success_threshold: float = param(0.5, doc="a rollout succeeded if its reward is above it")
    imitate: bool = param(False, doc="train the prefix tokens too; the paper does not")

    level: float = state(0.0)
    offset: dict = state(factory=dict)
    success: dict = state(factory=dict)
    touched: list = state(factory=list)

    def check(self) -> None:
        if self.initial_share > self.max_share:
            raise ConfigError(
                f"hint adaprefix.initial_share: must be at most max_share={self.max_share}, got {self.initial_share}"
            )
        self.level = self.initial_share

    @property
    def token_columns(self) -> frozenset[str]:
        """Dataset columns the host gives as token ids."""
        return frozenset({self.column})

    def prepare(self, new: list[Rollout], groups: dict[str, Group], ctx: Context) -> None:
        for r in new:
            solution = column_tokens(self, groups[r.group], self.column)
            n = min(self.prefix_length(r.prompt_key, len(solution), ctx), r.max_tokens - 1)
            if n > 0 and not r.segments:
                r.segments.append(Segment(solution[:n], "hint", imitated=self.imitate))

    def observe(self, groups: list[Group], ctx: Context) -> None:
        rates = self.success_rates(groups)
        for key, rate in rates.items():
            seen = key in self.success
            self.success[key] = self.decay * self.success[key] + (1 - self.decay) * rate if seen else rate
        self.touched = list(dict.fromkeys([*self.touched, *rates]))
        if (ctx.step + 1) % self.interval == 0:
            if self.touched and self.envelope(ctx) == 1:
                self._adapt()
            self.touched = []
        ctx.log("hint/adaprefix_level", self.level)

    def success_rates(self, groups: list[Group]) -> dict[str, float]:
        """Success rate of every prompt with a scorable rollout."""
        rates = defaultdict(list)
        for g in groups:
            rate = g.success_rate(self.success_threshold)
            if rate is not None:
                rates[g.prompt_key].append(rate)
        return {key: sum(seen) / len(seen) for key, seen in rates.items()}

    def envelope(self, ctx: Context) -> float:
        """1 until help is faded out, then down to 0."""
        start, end = self.withdraw_start * ctx.total_steps, self.withdraw_end * ctx.total_steps
        if ctx.step < start:
            return 1.0
        if ctx.step >= end or end <= start:
            return 0.0
        return 1 - (ctx.step - start) / (end - start)

    def share(self, key: str, ctx: Context) -> float:
        """Share of the solution in force for prompt `key` in this step."""
        return self.envelope(ctx) * _clip(self.level + self.offset.get(key, 0.0), 0.0, self.max_share)

    def prefix_length(self, key: str, solution_length: int, ctx: Context) -> int:
        """Solution tokens given to prompt `key` in this step; never the whole solution."""
        return min(math.floor(self.share(key, ctx) * solution_length), max(solution_length - 1, 0))

    def _adapt(self) -> None:
        error = {key: self.target - self.success[key] for key in self.touched}
        mean = sum(error.values()) / len(error)
        self.level = _clip(self.level + self.gain_global * mean, 0.0, self.max_share)
        for key, e in error.items():
            moved = self.offset.get(key, 0.0) + self.gain_local * (e - mean)
            self.offset[key] = _clip(moved, -self.max_share, self.max_share)


def _clip(x: float, low: float, high: float) -> float:
    return min(max(x, low), high)
