"""AERO: a small first wave, more rollouts for prompts without a success, and fewer wrong ones for training."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from ..core.context import Context
from ..core.errors import ConfigError
from ..core.kinds import Allocator
from ..core.params import param
from ..core.registry import register
from ..core.trajectory import Group, Rollout

STRATUM = "aero_stratum"
"""Entry of `group.extras`: what the first wave said of the prompt."""

Stratum = Literal["rescue", "partial", "high"]
Status = Literal["unsolved", "all_correct", "partial", "high"]


@register("allocator", "aero")
@dataclass
class AERO(Allocator):
    """Every prompt gets a small first wave; those with hardly any success get further small waves until their first
    success, their bound, or the end of the step's budget. Prompts with few successes then train all correct rollouts
    and only a random part of the wrong ones; those whose rollouts agree keep a handful.

    u = successes / scorable rollouts of the first wave: "rescue" if u <= rescue_below, "high" if u >= high_from, else
    "partial". In each round every rescue prompt without a success since draws min(extra, what is left). In the end,
    with c successes among n scorable rollouts: c = 0 or c = n keeps `n_homogeneous` random rows; c/n >= high_from keeps
    all; else all successes and max(1, round(neg_per_pos c)) random wrong rows.

    Kept rows carry the columns n_success = c and n_total = n for the posterior of `advantage: aero`. With other
    estimators rows that agree train nothing, so that n_homogeneous > 0 demands that one; set it to 0 for another.
    A rejected row still counts for controllers. Unscorable rows cost budget and are never kept.

    Rejecting wrong rows moves a group's mean from c/n towards c/(c+m); the advantage's stats="full" undoes it.

    Reconstructed: the sizes of first wave and budget relative to a group of 8, neg_per_pos, the treatment of "high".
    """

    paper = (
        "Train Less, Learn More: Adaptive Efficient Rollout Optimization for Group-Based Reinforcement Learning, "
        "arXiv 2602.14338"
    )
    scope = "batch"
    capabilities = frozenset({"rounds"})
    provides = frozenset({"n_success", "n_total"})

    first_wave: int = param(4, ge=1, doc="rollouts of every prompt; reconstructed, half of a group of 8")
    extra: int = param(2, ge=0, doc="rollouts of a rescue prompt per round; the paper's n_extra = 2")
    rescue_below: float = param(0.0, ge=0, lt=1, doc="success rate up to which a prompt is rescued; the paper's 0")
    high_from: float = param(0.5, gt=0, le=1, doc="success rate from which nothing is rejected; the paper's 0.5")
    neg_per_pos: float = param(1.0, ge=0, doc="wrong rows kept per correct one; reconstructed")
    total_rollouts: int | None = param(None, ge=1, doc="rollouts of the step; None: 8 per prompt, reconstructed")
    max_per_prompt: int | None = param(16, ge=1, doc="rollouts of a prompt; a re-implementation's 16; None: unbounded")
    n_homogeneous: int = param(4, ge=0, doc="rows kept of a group that agrees; a re-implementation's 4")
    success_threshold: float = param(0.5, doc="a rollout succeeded if its reward is above it")

    def check(self) -> None:
        if self.max_per_prompt is not None and self.max_per_prompt < self.first_wave:
            raise ConfigError(
                f"allocator aero.max_per_prompt: must be >= first_wave ({self.first_wave}), got {self.max_per_prompt}"
            )
        if self.rescue_below >= self.high_from:
            raise ConfigError(
                f"allocator aero.rescue_below: must be < high_from ({self.high_from:g}), got {self.rescue_below:g}"
            )

    @property
    def fixes(self) -> Mapping[str, str | None]:  # type: ignore[override]
        return {"advantage": "aero"} if self.n_homogeneous else {}

    def more(self, idle: list[Group], ctx: Context) -> list[Rollout]:
        first = [r for g in idle if not g.rollouts for r in g.start(self.first_wave)]
        return first or self._rescue(idle, ctx)

    def _rescue(self, idle: list[Group], ctx: Context) -> list[Rollout]:
        """One round of small waves, in the order of the batch."""
        new: list[Rollout] = []
        for g in idle:
            stratum = g.extras.setdefault(STRATUM, self.stratum(g))
            if stratum == "rescue" and not any(self._succeeded(r) for r in g.rollouts if r.wave > 0):
                new += g.start(max(0, min(self.extra, self.budget_left(ctx), self._room(g))))
        ctx.log("allocator/aero_rollouts", sum(len(g.rollouts) for g in ctx.started))
        return new

    def stratum(self, group: Group) -> Stratum:
        """What the rollouts so far say of the prompt."""
        c, n = self.counts(group)
        u = c / n if n else 0.0
        if u <= self.rescue_below:
            return "rescue"
        return "high" if u >= self.high_from else "partial"

    def counts(self, group: Group) -> tuple[int, int]:
        """(successes, scorable rollouts)."""
        scored = [r for r in group.rollouts if _scored(r)]
        return sum(self._succeeded(r) for r in scored), len(scored)

    def budget_left(self, ctx: Context) -> int:
        """Rollouts the step may still start."""
        total = 8 * len(ctx.started) if self.total_rollouts is None else self.total_rollouts
        return total - sum(len(g.rollouts) for g in ctx.started)

    def status(self, group: Group) -> Status:
        """What became of the prompt."""
        c, n = self.counts(group)
        if c == 0:
            return "unsolved"
        if c == n:
            return "all_correct"
        return "high" if c / n >= self.high_from else "partial"

    def complete(self, group: Group, ctx: Context) -> None:
        """Reject rows; the kept ones say how many there were."""
        status, (c, n) = self.status(group), self.counts(group)
        name = f"allocator/aero_{status}"
        ctx.log(name, ctx.metrics.get(name, 0.0) + 1)
        group.rollouts = self._kept(group, status, c, ctx)
        for r in group.rollouts:
            r.extras |= {"n_success": c, "n_total": n}

    def _kept(self, group: Group, status: Status, c: int, ctx: Context) -> list[Rollout]:
        rows = [r for r in group.rollouts if _scored(r)]
        if status == "high":
            return rows
        key = {r.slot: ctx.uniform("aero/keep", group.id, r.slot) for r in rows}
        random = sorted(rows, key=lambda r: key[r.slot])
        if status != "partial":
            chosen = random[: self.n_homogeneous]
        else:
            wrong = [r for r in random if not self._succeeded(r)]
            right = [r for r in rows if self._succeeded(r)]
            chosen = right + wrong[: max(1, math.floor(self.neg_per_pos * c + 0.5))]
        return sorted(chosen, key=lambda r: r.slot)

    def _room(self, group: Group) -> int:
        return self.extra if self.max_per_prompt is None else self.max_per_prompt - len(group.rollouts)

    def _succeeded(self, r: Rollout) -> bool:
        return _scored(r) and r.reward is not None and r.reward > self.success_threshold


def _scored(r: Rollout) -> bool:
    """Finished with a finite reward."""
    return r.scorable and r.reward is not None and math.isfinite(r.reward)
