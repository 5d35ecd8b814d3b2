"""ELPO: failed rollouts are bisected by resampling, to find the first step that can't be repaired."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from ..core.context import Context
from ..core.errors import ConfigError
from ..core.kinds import Allocator
from ..core.operations import Forward, Steps
from ..core.params import param
from ..core.registry import register
from ..core.trajectory import Group, Rollout
from ._steps import entropy_from, first_own, starts_after_tools

SEARCH = "elpo_search"
"""Entry of `group.extras`: the `Search` of the group."""


@dataclass
class Bisection:
    """One root's: its steps from `low` to `high` may be the first irrecoverable one; `asked` are the slots that were
    sampled to tell whether `step` is beyond repair."""

    root: int
    low: int
    high: int
    step: int = 0
    asked: list[int] = field(default_factory=list)


@dataclass
class Search:
    """A prompt's search.

    starts    slot of a failed root -> position of the first token of each step
    rise      slot of a failed root -> per step, entropy after it minus entropy at the start (NaN: unknown)
    critical  slot of a root -> its first irrecoverable step
    """

    starts: dict[int, list[int]] = field(default_factory=dict)
    rise: dict[int, list[float]] = field(default_factory=dict)
    critical: dict[int, int] = field(default_factory=dict)
    current: Bisection | None = None
    measured: bool = False


@register("allocator", "elpo")
@dataclass
class ELPO(Allocator):
    """Takes the failed rollout whose entropy rose most at some step and resamples from its middle step: if a
    continuation succeeds, the error comes later, else at or before this step. So on until the first irrecoverable step
    is found, then with the next failed rollout, until the prompt's rollouts are spent.

    A step is what the model writes up to and with a tool call. With L = 0, R = last step, while L < R:
    m = floor((L + R) / 2);   X = x_min + (x_max - x_min) sigmoid(sharpness (H_m - H_root));
    floor(X + 1/2) continuations keep the steps before m and regenerate the rest; any success: L = m + 1, none: R = m.
    H_m: mean entropy (nats) of up to `measured_tokens` tokens after step m's tool call, H_root of the first ones;
    unknown counts as no rise.

    All continuations are trained. The rollout's column critical_turn is the step found (-1: none), which `clip: elpo`
    reads (`method: elpo` with search). A success from step m clears step m itself, as the source has it. Tool output in
    a kept prefix is replayed as it was: the environment must not depend on more.

    Reconstructed: first_wave, success_reward, the rounding, ties, which go to the earlier rollout. `spend_rest` starts
    the prompt's unused rollouts from the prompt.
    """

    paper = (
        "Learning from the Irrecoverable: Error-Localized Policy Optimization for Tool-Integrated LLM Reasoning,"
        " arXiv 2602.09598"
    )
    capabilities = frozenset({"rounds", "continue", "tools", "forward:entropy"})
    provides = frozenset({"critical_turn"})

    total_rollouts: int = param(16, ge=1, doc="rollouts of a prompt; the paper's 16")
    first_wave: int = param(4, ge=1, doc="of these, started from the prompt; reconstructed")
    x_min: float = param(1.0, ge=1, doc="continuations at a step of falling entropy; the paper's 1")
    x_max: float = param(3.0, ge=1, doc="continuations at a step of rising entropy; the paper's 3")
    sharpness: float = param(5.0, ge=0, doc="how fast continuations grow with the rise, beta; the paper's 5")
    measured_tokens: int = param(20, ge=1, doc="tokens whose entropy is measured; reconstructed")
    success_reward: float = param(1.0, doc="reward from which a rollout is a success; reconstructed")
    spend_rest: bool = param(False, doc="start what the search leaves of the budget from the prompt")

    def check(self) -> None:
        if self.first_wave > self.total_rollouts:
            raise ConfigError(
                f"allocator elpo.first_wave: must be <= total_rollouts ({self.total_rollouts}), got {self.first_wave}"
            )
        if self.x_min > self.x_max:
            raise ConfigError(f"allocator elpo.x_min: must be <= x_max ({self.x_max:g}), got {self.x_min:g}")

    def more(self, idle: list[Group], ctx: Context) -> Steps:
        new = [r for g in idle if not g.rollouts for r in g.start(self.first_wave)]
        started = {r.group for r in new}
        searched = [g for g in idle if g.id not in started]
        fresh = [g for g in searched if not self.search(g).measured]
        failed = [(g, r) for g in fresh for r in g.done() if self._failed(r)]
        entropies = (yield Forward([r for _, r in failed], "entropy")) if failed else []
        for g in fresh:
            self.search(g).measured = True
        for (g, r), entropy in zip(failed, entropies, strict=True):
            self.measure(self.search(g), r, entropy)
        for g in searched:
            new += self._continue(g)
        return new

    def complete(self, group: Group, ctx: Context) -> None:
        critical = self.search(group).critical
        for r in group.rollouts:
            r.extras["critical_turn"] = critical.get(r.slot, -1)
        ctx.log("allocator/elpo_found", ctx.metrics.get("allocator/elpo_found", 0.0) + len(critical))

    def search(self, group: Group) -> Search:
        return group.extras.setdefault(SEARCH, Search())

    def measure(self, search: Search, r: Rollout, entropy: Sequence[float]) -> None:
        """Record the steps of a failed root and how the entropy rose after each (nats, one per response token)."""
        first = first_own(r)
        if first is None:
            return
        starts = [first, *starts_after_tools(r)]
        after = [entropy_from(r, entropy, at, self.measured_tokens, mean=True) for at in [*starts, None]]
        search.starts[r.slot] = starts
        search.rise[r.slot] = [h - after[0] for h in after[1:]]

    def _continue(self, group: Group) -> list[Rollout]:
        """The continuations that decide the next step, or the fresh rollouts that end the search."""
        search = self.search(group)
        self._conclude(group, search)
        while (left := self.total_rollouts - len(group.rollouts)) > 0:
            if search.current is None and not self._next(search):
                return group.start(left) if self.spend_rest else []
            b = search.current
            assert b is not None
            if b.low < b.high:
                b.step = (b.low + b.high) // 2
                n = min(self.continuations(search.rise[b.root][b.step]), left)
                new = group.fork(_at(group, b.root), search.starts[b.root][b.step], n)
                b.asked = [r.slot for r in new]
                return new
            search.critical[b.root], search.current = b.low, None
        return []

    def _conclude(self, group: Group, search: Search) -> None:
        """Take up what the last continuations say."""
        b = search.current
        if b is None or not b.asked:
            return
        if any(self._succeeded(_at(group, slot)) for slot in b.asked):
            b.low = b.step + 1
        else:
            b.high = b.step
        b.asked = []
        if b.low >= b.high:
            search.critical[b.root], search.current = b.low, None

    def _next(self, search: Search) -> bool:
        """Turn to the failed root whose entropy rose most; False where none is left."""
        known = {
            slot: max(_known(x) for x in rise) for slot, rise in search.rise.items() if slot not in search.critical
        }
        if not known:
            return False
        root = min(known, key=lambda slot: (-known[slot], slot))
        search.current = Bisection(root, 0, len(search.starts[root]) - 1)
        return True

    def continuations(self, rise: float) -> int:
        """Rollouts resampled from a step after which the entropy rose by `rise`."""
        x = self.x_min + (self.x_max - self.x_min) / (1 + math.exp(-self.sharpness * _known(rise)))
        return math.floor(x + 0.5)

    def _failed(self, r: Rollout) -> bool:
        return r.scorable and not self._succeeded(r)

    def _succeeded(self, r: Rollout) -> bool:
        return r.scorable and r.reward is not None and r.reward >= self.success_reward


def _at(group: Group, slot: int) -> Rollout:
    return next(r for r in group.rollouts if r.slot == slot)


def _known(rise: float) -> float:
    """0 where the rise is unknown."""
    return 0.0 if math.isnan(rise) else rise
