"""E3-RL4LLMs: rollouts in proportion to a prompt's difficulty rank, within bounds that open from epoch to epoch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from ..core.context import Context
from ..core.errors import ConfigError
from ..core.kinds import Allocator
from ..core.params import param
from ..core.registry import register
from ..core.state import state
from ..core.trajectory import Group, Rollout


@register("allocator", "e3")
@dataclass
class E3(Allocator):
    """At the end of every epoch prompts are ranked by the mean reward they have brought so far, 0 the easiest. In a
    step the rollouts above a common minimum are shared in proportion to the rank; the minimum falls and the maximum
    rises with every epoch, from an equal share to one that favours hard prompts.

    With ranks q of the step's b prompts (0 until ranked), n = `per_prompt`, w = q / (sum q + 1e-8):
    c = floor(n_min + (n - n_min) b w), at most n_max; what is left goes to prompts of the largest w first, up to n_max.
    Epoch end: n_min = max(n_min - update, lowest), n_max = min(n_max + update, highest); prompts sorted by mean reward,
    descending, the one at place s of N gets rank s / N. Prompts never tried count as 0.

    mode="strict" bounds every prompt by n_max; the release ("code") bounds only what is left over, so that a prompt
    with most of the rank can get more. An epoch is over at the first step before which as many prompts were started as
    the dataset has.
    """

    paper = "Enhancing Efficiency and Exploration in Reinforcement Learning for LLMs, arXiv 2505.18573"

    per_prompt: int | None = param(None, ge=1, doc="rollouts per prompt on average, n; None: group_size; the paper's 8")
    lowest: int = param(4, ge=0, doc="bound of the minimum; the paper's 4")
    highest: int = param(12, ge=1, doc="bound of the maximum; the paper's 12")
    update: int = param(2, ge=0, doc="by which the bounds open per epoch; the code's 2")
    mode: Literal["strict", "code"] = param("strict", doc="bound every prompt by the maximum, or as the release does")

    reward: dict = state(factory=dict)
    tried: dict = state(factory=dict)
    rank: dict = state(factory=dict)
    epochs: int = state(0)
    started: int = state(0)
    step: int = state(-1)

    def check(self) -> None:
        if self.lowest > self.highest:
            raise ConfigError(f"allocator e3.lowest: must be <= highest ({self.highest}), got {self.lowest}")

    def more(self, idle: list[Group], ctx: Context) -> list[Rollout]:
        new = [g for g in idle if not g.rollouts]
        if not new:
            return []
        if ctx.step != self.step:
            self.step = ctx.step
            if self.started >= len(ctx.prompts):
                self.started %= len(ctx.prompts)
                self.turn_epoch(ctx.prompts)
        self.started += len(new)
        n = self.mean_count(ctx)
        counts, unspent = self.counts([self.rank.get(g.prompt_key, 0.0) for g in new], n)
        ctx.log("allocator/e3_unspent", unspent)
        ctx.log("allocator/e3_largest", max(counts))
        return [r for g, k in zip(new, counts, strict=True) for r in g.start(k)]

    def observe(self, groups: list[Group], ctx: Context) -> None:
        for g in groups:
            rewards = [x for x in g.rewards() if not math.isnan(x)]
            if rewards:
                n = len(g.rollouts)
                self.reward[g.prompt_key] = self.reward.get(g.prompt_key, 0.0) + sum(rewards) / len(rewards) * n
                self.tried[g.prompt_key] = self.tried.get(g.prompt_key, 0) + n

    def counts(self, ranks: Sequence[float], n: int) -> tuple[list[int], int]:
        """Rollouts of each prompt, and how many of n per prompt nobody could take."""
        low, high = self.bounds(n)
        share = [q / (sum(ranks) + 1e-8) for q in ranks]
        counts = [math.floor(low + (n * len(ranks) - low * len(ranks)) * w) for w in share]
        if self.mode == "strict":
            counts = [min(c, high) for c in counts]
        rest = n * len(ranks) - sum(counts)
        for i in sorted(range(len(ranks)), key=lambda i: -share[i]):
            added = min(rest, max(high - counts[i], 0))
            counts[i] += added
            rest -= added
        return counts, rest

    def bounds(self, n: int) -> tuple[int, int]:
        """The minimum and maximum of this epoch."""
        if not self.epochs:
            return n, n
        opened = self.epochs * self.update
        return max(n - opened, self.lowest), min(n + opened, self.highest)

    def turn_epoch(self, keys: Iterable[str]) -> None:
        """Rank the dataset's prompts, and open the bounds."""
        self.epochs += 1
        mean = {key: self.reward[key] / self.tried[key] if self.tried.get(key) else 0.0 for key in keys}
        ordered = sorted(mean, key=lambda key: -mean[key])
        self.rank = {key: s / len(ordered) for s, key in enumerate(ordered)}

    def mean_count(self, ctx: Context) -> int:
        """n."""
        return ctx.group_size if self.per_prompt is None else self.per_prompt
