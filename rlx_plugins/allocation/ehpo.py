"""EHPO: branches where a response passes from fast to slow thinking, the likelier the more the entropy rose."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ..advantages.resum import positions
from ..core.context import Context
from ..core.errors import ConfigError
from ..core.kinds import Allocator
from ..core.operations import Forward, Steps
from ..core.params import param
from ..core.registry import register
from ..core.trajectory import Group, Rollout
from ._steps import from_model

BRANCHES = "ehpo_branches"
"""Entry of `group.extras`: the `Branch`es of the group."""


class Event(NamedTuple):
    """A passage from an easy to a hard unit: its position, and the mean entropy (nats) where the easy unit begins and
    ends."""

    at: int
    start: float
    end: float


class Branch(NamedTuple):
    """What an event led to: the trunk's slot, position, probability of branching, and how many branches there were."""

    trunk: int
    at: int
    probability: float
    count: int


@register("allocator", "ehpo")
@dataclass
class EHPO(Allocator):
    """Part of a prompt's rollouts, the trunks, start from the prompt. Where a trunk passes from an easy to a hard unit
    it branches with a probability that grows with the rise of its entropy there; what is left of the prompt's rollouts
    starts from the prompt too.

    dH = (mean entropy of the last `window` tokens of the easy unit - that of its first) / ln(vocabulary_size);
    P = clip(base + scale dH, 0, 1). Events are taken in the order of their positions (ties: by trunk), as if trunks
    were decoded in lock step: while rollouts are left and the trunk has made fewer than `max_forks` branches, one with
    u < P opens min(branches, rollouts left, max_forks - made) of them. A branch keeps the trunk's tokens up to the hard
    unit's mark. All make one group; a shared prefix is trained once, in its trunk.

    `easy` and `hard` are the token ids that open a unit; the unit is what follows, up to the next mark. Entropies are
    the policy's, from a forward pass; unknown counts as no rise. The paper branches in its long-context stage only.

    Reconstructed: dH, scale, window, the numbers of rollouts and branches.
    """

    paper = "Adaptive Dual Reasoner (EHPO), arXiv 2510.10207"
    capabilities = frozenset({"rounds", "continue", "forward:entropy"})

    easy: tuple[int, ...] = param(doc="token ids that open an easy unit")
    hard: tuple[int, ...] = param(doc="token ids that open a hard unit")
    total_rollouts: int = param(8, ge=1, doc="rollouts of a prompt; reconstructed")
    first_wave: int = param(4, ge=1, doc="of these, trunks; reconstructed")
    base: float = param(0.5, ge=0, le=1, doc="probability without a change of entropy, alpha; the paper's 0.5")
    scale: float = param(1.0, ge=0, doc="of the change of entropy in the probability; reconstructed")
    branches: int = param(1, ge=1, doc="branches of an event; reconstructed")
    max_forks: int = param(2, ge=0, doc="branches of a trunk; reconstructed")
    window: int = param(20, ge=1, doc="tokens at either end of the easy unit; reconstructed")
    vocabulary_size: int = param(151936, ge=2, doc="its logarithm divides entropies; that of Qwen2.5 and Qwen3")

    def check(self) -> None:
        if not self.easy or not self.hard or self.easy == self.hard:
            raise ConfigError("allocator ehpo.easy: expected token ids, other ones than those of hard")
        if self.first_wave > self.total_rollouts:
            raise ConfigError(
                f"allocator ehpo.first_wave: must be <= total_rollouts ({self.total_rollouts}), got {self.first_wave}"
            )

    def more(self, idle: list[Group], ctx: Context) -> Steps:
        new = [r for g in idle if not g.rollouts for r in g.start(self.first_wave)]
        started = {r.group for r in new}
        ended = [g for g in idle if g.id not in started and BRANCHES not in g.extras]
        trunks = [(g, r) for g in ended for r in g.done()]
        entropies = (yield Forward([r for _, r in trunks], "entropy")) if trunks else []
        events: dict[str, list[tuple[Event, Rollout, int]]] = {g.id: [] for g in ended}
        for (g, r), entropy in zip(trunks, entropies, strict=True):
            events[g.id] += [(event, r, i) for i, event in enumerate(self.events(r, entropy))]
        for g in ended:
            new += self._branch(g, events[g.id], ctx)
        return new

    def _branch(self, group: Group, events: list[tuple[Event, Rollout, int]], ctx: Context) -> list[Rollout]:
        made: dict[int, int] = {}
        new: list[Rollout] = []
        told = group.extras.setdefault(BRANCHES, [])
        for event, trunk, i in sorted(events, key=lambda e: (e[0].at, e[1].slot, e[2])):
            left = min(self.total_rollouts - len(group.rollouts), self.max_forks - made.get(trunk.slot, 0))
            p = self.probability(event)
            n = min(self.branches, left) if ctx.uniform("ehpo/branch", group.id, trunk.slot, i) < p else 0
            if n > 0:
                new += group.fork(trunk, event.at, n)
                made[trunk.slot] = made.get(trunk.slot, 0) + n
            told.append(Branch(trunk.slot, event.at, p, max(n, 0)))
        ctx.log("allocator/ehpo_branches", ctx.metrics.get("allocator/ehpo_branches", 0.0) + len(new))
        return new + group.start(self.total_rollouts - len(group.rollouts))

    def probability(self, event: Event) -> float:
        """P: probability with which the event branches."""
        rise = (event.end - event.start) / math.log(self.vocabulary_size)
        return min(max(self.base + self.scale * (0.0 if math.isnan(rise) else rise), 0.0), 1.0)

    def events(self, r: Rollout, entropy: Sequence[float]) -> list[Event]:
        """The passages from an easy unit to a hard one, in order."""
        tokens, own = r.tokens, from_model(r)
        easy = [(at, False) for at in positions(tokens, self.easy)]
        marks = sorted([*easy, *((at, True) for at in positions(tokens, self.hard))])
        found: list[Event] = []
        for (begin, hard), (end, next_hard) in zip(marks, marks[1:]):
            if next_hard and not hard:
                inside = [entropy[i] for i in range(begin, end) if own[i]]
                unit = inside[len(self.easy) :] or inside
                found.append(Event(end, _mean(unit[: self.window]), _mean(unit[-self.window :])))
        return found


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else math.nan
