"""Orchard's balanced adaptive rollout: trajectories in strides until a group with enough of both outcomes is there."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from ..core.context import Context
from ..core.errors import ConfigError
from ..core.kinds import Allocator
from ..core.params import param
from ..core.registry import register
from ..core.state import state
from ..core.trajectory import Group, Rollout

COMPLETED, TRUNCATED, ABORTED = range(3)


class Trajectory(NamedTuple):
    """What decides about a trajectory: its outcome (NaN: unknown), how it ended, and its length in tokens."""

    reward: float
    rank: int
    length: int


class Assembly(NamedTuple):
    """The members of a training group, successes first, and which of the three attempts found them."""

    members: list[int]
    stage: Literal["balanced", "relaxed", "best_effort"]


@register("allocator", "orchard_bar")
@dataclass
class OrchardBAR(Allocator):
    """Generates trajectories of a prompt in strides until a training group of `size` can be put together in which the
    share of successes lies in [share_low, share_high]; completed and short ones are preferred, the rest is left out.

    Among those that were not aborted, successes (reward > 0) and the others, each by (completed before truncated,
    length, order): the number n+ of successes nearest to the middle of the band, smaller first, for which both are
    there ("balanced"). After `max_per_prompt` trajectories any share will do ("relaxed"), then the best of all whatever
    their outcome ("best_effort"). A group without both outcomes, of another size or with an aborted member is dropped,
    and another prompt takes its place, up to `max_rounds` times in a step.

    Truncated is what reached its token bound; aborted what was lost or can't be scored. The choice depends on outcomes:
    a group's mean says nothing of the prompt's pass rate, and short trajectories are preferred. Controllers see all.

    Where pseudo-code and prose differ, truncated trajectories are usable, and the relaxed share may be 0 or 1.
    """

    paper = "Orchard: An Open-Source Agentic Modeling Framework, arXiv 2605.15040"
    capabilities = frozenset({"rounds"})
    refills = True

    size: int = param(8, ge=1, doc="trajectories of a training group, N; the paper's 8")
    max_per_prompt: int = param(16, ge=1, doc="trajectories of a prompt, N_max; the paper's 16")
    stride: int = param(16, ge=1, doc="trajectories between two looks; the paper's 16, one wave")
    share_low: float = param(0.375, ge=0, le=1, doc="least share of successes; the paper's 0.375")
    share_high: float = param(0.625, ge=0, le=1, doc="largest share of successes; the paper's 0.625")
    max_rounds: int = param(4, ge=1, doc="times prompts are drawn in a step, dropped ones' substitutes included")

    step: int = state(-1)
    rounds: int = state(0)

    def check(self) -> None:
        if self.size > self.max_per_prompt:
            raise ConfigError(
                f"allocator orchard_bar.size: must be <= max_per_prompt ({self.max_per_prompt}), got {self.size}"
            )
        if self.share_low > self.share_high:
            raise ConfigError(
                f"allocator orchard_bar.share_low: must be <= share_high ({self.share_high:g}), got {self.share_low:g}"
            )

    def intake(self, need: int, ctx: Context) -> tuple[list[Group], int]:
        self.rounds = self.rounds + 1 if ctx.step == self.step else 1
        self.step = ctx.step
        return [], need if self.rounds <= self.max_rounds else 0

    def more(self, idle: list[Group], ctx: Context) -> list[Rollout]:
        new: list[Rollout] = []
        for g in idle:
            if not (g.rollouts and self.balanced(self.trajectories(g))):
                new += g.start(min(self.stride, self.max_per_prompt - len(g.rollouts)))
        return new

    def complete(self, group: Group, ctx: Context) -> None:
        pool = self.trajectories(group)
        found = self.assemble(pool)
        usable = self.usable([pool[i] for i in found.members])
        name = f"allocator/orchard_bar_{found.stage if usable else 'dropped'}"
        ctx.log(name, ctx.metrics.get(name, 0.0) + 1)
        rows = sorted(group.rollouts, key=lambda r: r.slot)
        group.rollouts = [rows[i] for i in found.members] if usable else []

    def trajectories(self, group: Group) -> list[Trajectory]:
        """The group's trajectories, in the order of their slots."""
        return [_trajectory(r) for r in sorted(group.rollouts, key=lambda r: r.slot)]

    def assemble(self, pool: Sequence[Trajectory]) -> Assembly:
        """The training group, from all trajectories of a prompt."""
        if (members := self.balanced(pool)) is not None:
            return Assembly(members, "balanced")
        if (members := self._with_share(pool, 0.0, 1.0)) is not None:
            return Assembly(members, "relaxed")
        best = sorted(range(len(pool)), key=lambda i: (pool[i].rank, pool[i].length, i))
        return Assembly(best[: self.size], "best_effort")

    def balanced(self, pool: Sequence[Trajectory]) -> list[int] | None:
        """A group with a share of successes in the band; None where there is none."""
        return self._with_share(pool, self.share_low, self.share_high)

    def usable(self, members: Sequence[Trajectory]) -> bool:
        """Whether the group has its size, both outcomes, and nobody aborted."""
        whole = len(members) == self.size and all(m.rank != ABORTED for m in members)
        return whole and len({m.reward for m in members}) > 1

    def _with_share(self, pool: Sequence[Trajectory], low: float, high: float) -> list[int] | None:
        order = sorted(
            (i for i, t in enumerate(pool) if t.rank != ABORTED), key=lambda i: (pool[i].rank, pool[i].length, i)
        )
        right = [i for i in order if pool[i].reward > 0]
        wrong = [i for i in order if pool[i].reward <= 0]
        wanted = math.floor((self.share_low + self.share_high) / 2 * self.size + 0.5)
        numbers = range(math.ceil(low * self.size - 1e-9), math.floor(high * self.size + 1e-9) + 1)
        for n in sorted(numbers, key=lambda n: (abs(n - wanted), n)):
            if n <= len(right) and self.size - n <= len(wrong):
                return right[:n] + wrong[: self.size - n]
        return None


def _trajectory(r: Rollout) -> Trajectory:
    if not r.scorable or r.reward is None:
        return Trajectory(math.nan, ABORTED, len(r))
    return Trajectory(r.reward, COMPLETED if r.stop == "eos" else TRUNCATED, len(r))
