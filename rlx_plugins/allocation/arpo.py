"""ARPO: rollouts are forked after tool calls, where the policy has become less certain than it was at the start."""

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
from ._steps import entropy_from, first_own, starts_after_tokens, starts_after_tools

SEARCH = "arpo_search"
"""Entry of `group.extras`: the `Search` of the group."""


@dataclass
class Step:
    """A place where a rollout may be forked: its position, and the normalised entropy of the tokens from there on."""

    at: int
    entropy: float


@dataclass
class Search:
    """A prompt's search.

    round  the next round; in round r every rollout that has an r-th step is considered
    start  slot -> normalised entropy of the first tokens of the rollout, or of the one it was forked from
    steps  slot -> its steps, those in a forked prefix included
    """

    round: int = 0
    start: dict[int, float] = field(default_factory=dict)
    steps: dict[int, list[Step]] = field(default_factory=dict)
    over: bool = False


@register("allocator", "arpo")
@dataclass
class ARPO(Allocator):
    """Part of a prompt's rollouts start from the prompt. Where the entropy of the tokens after a tool's answer is above
    that of the rollout's first tokens, it is forked there; what is left in the end starts from the prompt again.

    Entropy H: sum of the policy's entropies over up to `measured_tokens` tokens, divided by ln(vocabulary_size); dH: H
    after the tool call minus H at the start. In round r = 0, 1, ... every rollout with an r-th tool call, in the order
    of their slots, is forked up to min(max_forks, what is left of the budget) times: while
    base + entropy_weight dH > threshold, or, stochastic, for each u with clip(u - entropy_weight dH, 0, 1) <= threshold
    (so that P = threshold + entropy_weight dH). A fork inherits its parent's start and takes part from the next round
    on. A prompt gets `total_rollouts` rollouts in all. Unknown entropy: no fork.

    The deterministic rule is the paper's, the stochastic one the code's. A rollout runs to its end before it is forked,
    which changes neither the decisions nor the tokens, only when forks start. `advantage: arpo` credits the tree
    (`method: arpo`).

    Deviations: entropies are the policy's over the whole vocabulary, from a forward pass, where the code has the top 10
    of the engine. `boundary_tokens` takes these tokens for the ends of steps where no tools are called.
    """

    paper = "Agentic Reinforced Policy Optimization, arXiv 2507.19849"

    total_rollouts: int = param(16, ge=1, doc="rollouts of a prompt, M; the paper's 16")
    first_wave: int = param(8, ge=1, doc="of these, started at once, N; the paper's 8")
    max_forks: int = param(1, ge=1, doc="forks of a rollout at one step, Z; the code's beam of 2 minus 1")
    base: float = param(0.5, doc="branching score without a change of entropy, alpha; the paper's 0.5")
    entropy_weight: float = param(0.2, ge=0, doc="of the change of entropy, beta; the paper's 0.2")
    threshold: float = param(0.5, doc="branching score above which there is a fork, tau; the paper's 0.5")
    stochastic: bool = param(False, doc="fork with a probability, as the released code does")
    measured_tokens: int = param(20, ge=1, doc="tokens whose entropy is measured; the code's 20")
    vocabulary_size: int = param(151936, ge=2, doc="its logarithm divides entropies; that of Qwen2.5 and Qwen3")
    boundary_tokens: tuple[int, ...] | None = param(
        None, doc="token ids that end a step; None: a step ends with a tool call"
    )

    def check(self) -> None:
        if self.first_wave > self.total_rollouts:
            raise ConfigError(
                f"allocator arpo.first_wave: must be <= total_rollouts ({self.total_rollouts}), got {self.first_wave}"
            )
        if self.boundary_tokens == ():
            raise ConfigError("allocator arpo.boundary_tokens: expected at least one token id")

    @property
    def capabilities(self) -> frozenset[str]:
        steps = set[str]() if self.boundary_tokens else {"tools"}
        return frozenset({"rounds", "continue", "forward:entropy"} | steps)

    def more(self, idle: list[Group], ctx: Context) -> Steps:
        new = [r for g in idle if not g.rollouts for r in g.start(self.first_wave)]
        started = {r.group for r in new}
        searched = [g for g in idle if g.id not in started and not self.search(g).over]
        unseen = [(g, r) for g in searched for r in g.done() if r.slot not in self.search(g).steps]
        entropies = (yield Forward([r for _, r in unseen], "entropy")) if unseen else []
        for (g, r), entropy in zip(unseen, entropies, strict=True):
            self.measure(self.search(g), r, entropy)
        for g in searched:
            new += self._continue(g, ctx)
        forks = sum(r.forked is not None for r in new)
        ctx.log("allocator/arpo_forks", ctx.metrics.get("allocator/arpo_forks", 0.0) + forks)
        return new

    def search(self, group: Group) -> Search:
        return group.extras.setdefault(SEARCH, Search())

    def measure(self, search: Search, r: Rollout, entropy: Sequence[float]) -> None:
        """Record a finished rollout's entropies (nats, one per response token)."""
        scale = math.log(self.vocabulary_size)
        if r.slot not in search.start:
            search.start[r.slot] = entropy_from(r, entropy, first_own(r), self.measured_tokens) / scale
        places = starts_after_tokens(r, self.boundary_tokens) if self.boundary_tokens else starts_after_tools(r)
        search.steps[r.slot] = [Step(i, entropy_from(r, entropy, i, self.measured_tokens) / scale) for i in places]

    def _continue(self, group: Group, ctx: Context) -> list[Rollout]:
        """The forks of the next round that has any, or the fresh rollouts that end the search."""
        search = self.search(group)
        while any(len(steps) > search.round for steps in search.steps.values()):
            forks = self._forks(group, search, ctx)
            search.round += 1
            if forks:
                return forks
        search.over = True
        return group.start(self.total_rollouts - len(group.rollouts))

    def _forks(self, group: Group, search: Search, ctx: Context) -> list[Rollout]:
        forks: list[Rollout] = []
        for r in list(group.rollouts):
            steps = search.steps.get(r.slot, [])
            if len(steps) <= search.round:
                continue
            step = steps[search.round]
            rise = step.entropy - search.start[r.slot]
            for attempt in range(min(self.max_forks, self.total_rollouts - len(group.rollouts))):
                if self.branches(rise, ctx, group.id, r.slot, search.round, attempt):
                    (fork,) = group.fork(r, step.at, 1)
                    search.start[fork.slot] = search.start[r.slot]
                    forks.append(fork)
                elif not self.stochastic:
                    break
        return forks

    def branches(self, rise: float, ctx: Context, *keys: object) -> bool:
        """Whether a rollout whose entropy rose by `rise` is forked; `keys` name the draw."""
        if math.isnan(rise):
            return False
        if not self.stochastic:
            return self.base + self.entropy_weight * rise > self.threshold
        return min(max(self.uniform(ctx, *keys) - self.entropy_weight * rise, 0.0), 1.0) <= self.threshold

    def uniform(self, ctx: Context, *keys: object) -> float:
        return ctx.uniform("arpo/branch", *keys)
