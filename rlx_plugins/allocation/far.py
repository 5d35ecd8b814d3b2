"""Factorized adaptive rollout: more prompts until enough groups are mixed, more attempts only where all were wrong."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from ..core.context import Context
from ..core.errors import ConfigError
from ..core.kinds import Allocator
from ..core.params import param
from ..core.registry import register
from ..core.state import state
from ..core.trajectory import Group, Rollout


@register("allocator", "far")
@dataclass
class FAR(Allocator):
    """Two dials: prompts are added until enough groups hold a success and a failure, and only prompts whose attempts
    were all wrong get more attempts, until one is right. Each wave ends when 99 % of it is there; stragglers are lost.

    Every new prompt gets `first_wave` rollouts; while a prompt has a scored rollout, none with a positive reward, and
    fewer than `max_per_prompt`, it gets `extra` more. A group is informative if its rewards are not all equal; while g
    of the step's groups are missing, max(1, expand g) further prompts are started, up to `max_prompts` in a step.
    Of an informative group `train_size` rows are trained: k1 = min(successes, max(1, floor(train_size / 2))) successes,
    then failures, then successes again while there are; of each class the earlier waves first and within a wave the
    shorter responses, which finish first. Other groups leave the batch.

    A batch may have fewer groups than wanted, where prompts or max_prompts end. Waves are those of the whole step.

    Reconstructed: every number but the 99 %, the waves, the choice of rows.
    """

    paper = "SimpleSearch-VL: Factorized Adaptive Rollout, arXiv 2606.31504"
    scope = "batch"
    refills = True

    first_wave: int = param(4, ge=1, doc="attempts at every prompt, n_base; reconstructed")
    extra: int = param(2, ge=1, doc="further attempts per wave at a prompt that failed, n_step; reconstructed")
    max_per_prompt: int = param(8, ge=1, doc="attempts at a prompt, n_max; reconstructed")
    expand: int = param(2, ge=1, doc="prompts started per missing group; reconstructed")
    max_prompts: int | None = param(None, ge=1, doc="prompts started in a step; None: as many as are offered")
    train_size: int = param(4, ge=2, doc="rows trained of a group; reconstructed")
    finish_share: float = param(0.99, gt=0, le=1, doc="share of a wave that is waited for; the paper's 0.99")

    step: int = state(-1)
    started: int = state(0)

    def check(self) -> None:
        if self.first_wave > self.max_per_prompt:
            raise ConfigError(
                f"allocator far.first_wave: must be <= max_per_prompt ({self.max_per_prompt}), got {self.first_wave}"
            )

    @property
    def capabilities(self) -> frozenset[str]:
        return frozenset({"rounds"} | ({"abort"} if self.finish_share < 1 else set()))

    def intake(self, need: int, ctx: Context) -> tuple[list[Group], int]:
        first = ctx.step != self.step
        if first:
            self.step, self.started = ctx.step, 0
        wanted = need if first else max(1, self.expand * need)
        left = math.inf if self.max_prompts is None else self.max_prompts - self.started
        n = int(min(wanted, left))
        self.started += n
        return [], n

    def more(self, idle: list[Group], ctx: Context) -> list[Rollout]:
        first = [r for g in idle if not g.rollouts for r in g.start(self.first_wave)]
        if first:
            return first
        wrong = [g for g in idle if self.is_wrong(g)]
        return [r for g in wrong for r in g.start(min(self.extra, self.max_per_prompt - len(g.rollouts)))]

    def complete(self, group: Group, ctx: Context) -> None:
        late = sum(r.state == "pruned" for r in group.rollouts)
        for name, n in (("late", late), ("uninformative", int(not self.is_informative(group)))):
            key = f"allocator/far_{name}"
            ctx.log(key, ctx.metrics.get(key, 0.0) + n)
        group.rollouts = self.train_rows(group) if self.is_informative(group) else []

    def is_wrong(self, group: Group) -> bool:
        """Attempted without any success, and not as often as it may be."""
        rewards = _rewards(group)
        return bool(rewards) and not any(x > 0 for x in rewards.values()) and len(group.rollouts) < self.max_per_prompt

    def is_informative(self, group: Group) -> bool:
        """Whether the rewards of the group are not all equal."""
        return len(set(_rewards(group).values())) > 1

    def train_rows(self, group: Group) -> list[Rollout]:
        """The rows that are trained, in the order of their slots."""
        rewards = _rewards(group)
        order = sorted((r for r in group.rollouts if r.slot in rewards), key=lambda r: (r.wave, len(r), r.slot))
        right = [r for r in order if rewards[r.slot] > 0]
        wrong = [r for r in order if rewards[r.slot] <= 0]
        k1 = min(len(right), max(1, self.train_size // 2))
        k0 = min(len(wrong), self.train_size - k1)
        k1 = min(len(right), self.train_size - k0)
        return sorted(right[:k1] + wrong[:k0], key=lambda r: r.slot)


def _rewards(group: Group) -> dict[Any, float]:
    """Rewards by slot of the scorable rollouts."""
    return {r.slot: r.reward for r in group.rollouts if r.scorable and r.reward is not None}
