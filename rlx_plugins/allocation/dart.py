"""DART: fewer rollouts for tasks that succeed, a length limit per task, and a stored success where a group failed."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..core.context import Context
from ..core.errors import ConfigError
from ..core.kinds import Allocator
from ..core.params import param
from ..core.registry import register
from ..core.state import state
from ..core.trajectory import Group, Rollout

POOLED = "pooled"
"""Tag of a stored success that joined a group; it is the row's `source` in the batch."""


@register("allocator", "dart")
@dataclass
class DART(Allocator):
    """A task gets fewer rollouts once it succeeds often, and no longer responses than its longest success; a group
    without any success gets one that was stored earlier, so that it still has something to learn from.

    With s the mean success of the task's rollouts so far (of the last `window`; 0 without any):
    n = max_per_prompt if s <= rate_threshold, else
    max(min_per_prompt, ceil(max_per_prompt (1 - s) / (1 - rate_threshold)));
    limit = max(least_tokens, longest success), or default_tokens (None: max_tokens) where the task never succeeded.
    A group whose best reward is below `success_reward` gets one success of its task, drawn uniformly from the pool,
    before advantages are computed, with the log-probs its engine reported then. New successes join the pool.

    Where GRPO's advantage is used min_per_prompt must be at least 2: a group of one has no baseline. Limits count
    response tokens; the paper's count steps of a GUI agent. `selector: dart` is the companion (`method: dart`).

    Reconstructed: the decrease above the threshold, min_per_prompt, window. `pool_size` bounds what a task stores.
    """

    paper = "DART: efficient multi-turn RL for GUI agents, arXiv 2509.23866"
    max_per_prompt: int = param(8, ge=1, doc="rollouts of a task that rarely succeeds; the paper's 8")
    min_per_prompt: int = param(1, ge=1, doc="rollouts of a task that always succeeds; reconstructed")
    rate_threshold: float = param(0.6, ge=0, lt=1, doc="success rate up to which a task gets all; the paper's 0.6")
    window: int | None = param(None, ge=1, doc="rollouts of a task the rate is over; None: all; reconstructed")
    default_tokens: int | None = param(None, ge=1, doc="limit of a task that never succeeded; None: max_tokens")
    least_tokens: int = param(1, ge=1, doc="least limit of a task")
    success_reward: float = param(1.0, doc="reward from which a rollout is a success; the paper's 1")
    pool_size: int | None = param(8, ge=1, doc="successes stored per task, newest kept; None: all")

    history: dict = state(factory=dict)
    longest: dict = state(factory=dict)
    pool: dict = state(factory=dict)

    def check(self) -> None:
        if self.min_per_prompt > self.max_per_prompt:
            raise ConfigError(
                f"allocator dart.min_per_prompt: must be <= max_per_prompt ({self.max_per_prompt}),"
                f" got {self.min_per_prompt}"
            )

    def more(self, idle: list[Group], ctx: Context) -> list[Rollout]:
        new: list[Rollout] = []
        for g in (g for g in idle if not g.rollouts):
            rows = g.start(self.count(self.rate(g.prompt_key)))
            for r in rows:
                r.max_tokens = min(r.max_tokens, self.limit(g.prompt_key, ctx))
            new += rows
        ctx.log("allocator/dart_rollouts", sum(len(g.rollouts) for g in ctx.started))
        return new

    def complete(self, group: Group, ctx: Context) -> None:
        """Add a stored success to a group that has none."""
        stored = self.pool.get(group.prompt_key, [])
        if not self.injects(group, len(stored)):
            return
        chosen = Rollout.from_plain(stored[math.floor(ctx.uniform("dart/pool", group.id) * len(stored))])
        chosen.group, chosen.slot = group.id, 1 + max(r.slot for r in group.rollouts)
        chosen.wave, chosen.tag = 1 + max(r.wave for r in group.rollouts), POOLED
        group.rollouts.append(chosen)
        ctx.log("allocator/dart_injected", ctx.metrics.get("allocator/dart_injected", 0.0) + 1)

    def observe(self, groups: list[Group], ctx: Context) -> None:
        for g in groups:
            key = g.prompt_key
            for r in (r for r in g.done() if r.scorable):
                won = self._succeeded(r)
                past = [*self.history.get(key, []), int(won)]
                self.history[key] = past if self.window is None else past[-self.window :]
                if won:
                    self.longest[key] = max(self.longest.get(key, 0), len(r))
                    stored = [*self.pool.get(key, []), r.to_plain() | {"extras": {}}]
                    self.pool[key] = stored if self.pool_size is None else stored[-self.pool_size :]

    def rate(self, key: str) -> float:
        """Share of a task's rollouts that succeeded; 0 before it was tried."""
        past = self.history.get(key, [])
        return sum(past) / len(past) if past else 0.0

    def count(self, rate: float) -> int:
        """Rollouts of a task of this success rate."""
        if rate <= self.rate_threshold:
            return self.max_per_prompt
        share = (1 - rate) / (1 - self.rate_threshold)
        return max(self.min_per_prompt, math.ceil(self.max_per_prompt * share - 1e-9))

    def limit(self, key: str, ctx: Context) -> int:
        """Response tokens a task's rollouts may have."""
        if key in self.longest:
            return max(self.least_tokens, self.longest[key])
        return ctx.max_tokens if self.default_tokens is None else self.default_tokens

    def injects(self, group: Group, stored: int) -> bool:
        """Whether a stored success joins the group."""
        done = group.done()
        return bool(done) and stored > 0 and not any(self._succeeded(r) for r in done)

    def _succeeded(self, r: Rollout) -> bool:
        return r.scorable and r.reward is not None and r.reward >= self.success_reward
