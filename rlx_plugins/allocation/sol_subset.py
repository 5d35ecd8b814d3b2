"""Sol-RL's contrastive subset: many cheap candidates per prompt, of which the best and the worst are trained."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ..core.context import Context
from ..core.kinds import Allocator
from ..core.params import param
from ..core.registry import register
from ..core.trajectory import Group, Rollout


@register("allocator", "sol_subset")
@dataclass
class SolSubset(Allocator):
    """A large pool of candidates per prompt is sampled with a fast, low-precision policy; only those with the highest
    and the lowest rewards make the training group, whose advantages then come from the chosen alone.

    Candidates with a finite reward, by reward descending and then by slot: the first `k_top` and the last `k_bottom`.
    Where the pool has no more than both together all are taken. Rewards decide only the order, so any increasing
    transform of them gives the same choice, and ties (binary rewards) go by slot.

    From text to image, where the paper comes from, a seed reproduces the candidate in full precision; text does not.
    The low-precision text is kept, scored by the trainer, and weighed by a truncated importance weight
    (`method: sol_subset`). Selection by reward makes a group's mean and spread unrepresentative of the policy: the logs
    have the spread of pool and choice. Controllers still see the whole pool.
    """

    paper = "Sol-RL: speed-of-light reinforcement learning, arXiv 2604.06916"
    capabilities = frozenset({"rounds"})

    pool: int = param(96, ge=1, doc="candidates per prompt; the paper's 96")
    k_top: int = param(12, ge=1, doc="of the highest rewards; the paper's 12")
    k_bottom: int = param(12, ge=1, doc="of the lowest rewards; the paper's 12")
    drop_flat: bool = param(False, doc="leave a prompt whose pool has one reward only out of the batch")

    def more(self, idle: list[Group], ctx: Context) -> list[Rollout]:
        return [r for g in idle if not g.rollouts for r in g.start(self.pool)]

    def complete(self, group: Group, ctx: Context) -> None:
        rollouts = sorted(group.rollouts, key=lambda r: r.slot)
        rewards = [r.reward if r.state == "finished" and r.reward is not None else math.nan for r in rollouts]
        top, bottom = self.split(rewards)
        chosen = [rewards[i] for i in (*top, *bottom)]
        flat = len(set(chosen)) <= 1
        group.rollouts = [] if flat and self.drop_flat else [rollouts[i] for i in sorted((*top, *bottom))]
        ctx.log("allocator/sol_subset_pool_std", spread([x for x in rewards if math.isfinite(x)]))
        ctx.log("allocator/sol_subset_chosen_std", spread(chosen))

    def split(self, rewards: Sequence[float]) -> tuple[list[int], list[int]]:
        """Indices of the highest and of the lowest rewards, ascending each."""
        ranked = sorted((i for i, x in enumerate(rewards) if math.isfinite(x)), key=lambda i: (-rewards[i], i))
        n = len(ranked)
        if n > self.k_top + self.k_bottom:
            return sorted(ranked[: self.k_top]), sorted(ranked[n - self.k_bottom :])
        first = min(self.k_top, math.ceil(n / 2))
        return sorted(ranked[:first]), sorted(ranked[first:])


def spread(values: Sequence[float]) -> float:
    """Population standard deviation; 0 without values."""
    if not values:
        return 0.0
    mean = sum(values) / len(values)
    return math.sqrt(sum((x - mean) ** 2 for x in values) / len(values))


def inversions(top: Sequence[float], bottom: Sequence[float]) -> int:
    """Pairs of a chosen high and a chosen low candidate whose other rewards (full precision) stand the other way."""
    return sum(high < low for high in top for low in bottom)
