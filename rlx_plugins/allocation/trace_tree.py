"""TRACE: a small first stage for every prompt, and continuations of prefixes that may still end differently."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from ..core.context import Context
from ..core.errors import ConfigError, DataError
from ..core.kinds import Allocator
from ..core.operations import Forward, Steps
from ..core.params import param
from ..core.registry import register
from ..core.state import state
from ..core.trajectory import Group, Rollout
from ._greedy import greedy
from ._steps import starts_after_tokens, starts_after_tools

TREE = "trace_tree"
"""Entry of `group.extras`: the `Features` of the group."""


class Anchor(NamedTuple):
    """A place to continue a rollout: which one, after which turn, and the predicted success from there."""

    rollout: int
    turn: int
    value: float


@dataclass
class Features:
    """What the predictor sees of a group: hidden states [H] after the prompt and after each turn of its first rollouts.

    after  slot -> (position of the next turn's first token, hidden state) per turn
    """

    prompt: Tensor
    after: dict[int, list[tuple[int, Tensor]]] = field(default_factory=dict)
    continued: bool = False


@register("allocator", "trace_tree")
@dataclass
class TraceTree(Allocator):
    """First every prompt gets a few rollouts, so many that outcomes are likely to differ; the rest of the step's budget
    continues finished rollouts from the end of a turn where a continuation is likely to end otherwise. A small
    predictor of success from hidden states drives both, and nothing else.

    Stage 1, v = predicted success of the prompt: maximise sum of 1 - v^m - (1-v)^m, the chance that m rollouts are not
    all equal. Stage 2, for a rollout with outcome r and predicted success V after a turn: q = r V + (1-r) (1-V);
    maximise the sum of 1 - q^k, the chance that one of k continuations ends otherwise. Both greedy by marginal gain,
    ties to the earlier; what brings no gain is not spent. Continuations start from rollouts of stage 1 only.

    Predictor: logistic in the last layer's hidden state [H] of the prompt's and each turn's last token; after the step
    one gradient step on the cross-entropy to Vhat, the mean success of the rollouts through the node. Unknown counts as
    1/2, and so does everything at first. A turn ends with a tool call, or with one of `boundary_tokens`; tool output in
    a kept prefix is replayed as it was: the environment must not depend on more.

    Reconstructed: the bounds, the greedy solution, the predictor's loss and step, turns without tools.
    """

    paper = "TRACE: tree rollout allocation with a prefix value predictor, arXiv 2606.11119"
    scope = "batch"

    total_rollouts: int | None = param(None, ge=1, doc="rollouts of the step; None: group_size per prompt")
    first_wave: int = param(2, ge=1, doc="rollouts of stage 1 per prompt on average, m; the paper's 2 (and 6)")
    min_per_prompt: int = param(1, ge=1, doc="of stage 1 for every prompt; reconstructed")
    max_per_prompt: int | None = param(None, ge=1, doc="of stage 1 for a prompt; None: unbounded; reconstructed")
    max_branches: int = param(4, ge=0, doc="continuations of one prefix; reconstructed")
    learning_rate: float = param(1e-4, ge=0, doc="of the predictor; reconstructed")
    success_threshold: float = param(0.5, doc="a rollout succeeded if its reward is above it")
    boundary_tokens: tuple[int, ...] | None = param(
        None, doc="token ids that end a turn; None: a turn ends with a tool call"
    )

    weight: list = state(factory=list)
    bias: float = state(0.0)

    def check(self) -> None:
        if self.max_per_prompt is not None and self.max_per_prompt < self.min_per_prompt:
            raise ConfigError(
                f"allocator trace_tree.max_per_prompt: must be >= min_per_prompt ({self.min_per_prompt}),"
                f" got {self.max_per_prompt}"
            )
        if self.boundary_tokens == ():
            raise ConfigError("allocator trace_tree.boundary_tokens: expected at least one token id")

    @property
    def capabilities(self) -> frozenset[str]:
        turns = set[str]() if self.boundary_tokens else {"tools"}
        return frozenset({"rounds", "continue", "forward:hidden"} | turns)

    def more(self, idle: list[Group], ctx: Context) -> Steps:
        new = [g for g in idle if not g.rollouts]
        if new:
            return (yield from self._first_stage(new, ctx))
        return (yield from self._second_stage([g for g in idle if not g.extras[TREE].continued], ctx))

    def _first_stage(self, groups: list[Group], ctx: Context) -> Steps:
        prompts = [Rollout(g.prompt_key, g.id, 0, list(g.prompt), max_tokens=g.max_tokens) for g in groups]
        for g, hidden in zip(groups, (yield Forward(prompts, "hidden")), strict=True):
            g.extras[TREE] = Features(_detached(hidden))
        values = [self.predict(g.extras[TREE].prompt) for g in groups]
        budget = min(self.first_wave * len(groups), self.budget(ctx))
        counts = self.allocate_roots(values, budget)
        return [r for g, n in zip(groups, counts, strict=True) for r in g.start(n)]

    def _second_stage(self, groups: list[Group], ctx: Context) -> Steps:
        rows = [(g, r) for g in groups for r in g.done() if r.scorable]
        places = [(g, r, at) for g, r in rows for at in self.turn_ends(r)]
        prefixes = [_prefix(r, at) for _, r, at in places]
        hidden = (yield Forward(prefixes, "hidden")) if prefixes else []
        for (g, r, at), h in zip(places, hidden, strict=True):
            g.extras[TREE].after.setdefault(r.slot, []).append((at, _detached(h)))
        for g in groups:
            g.extras[TREE].continued = True
        after = [g.extras[TREE].after.get(r.slot, []) for g, r in rows]
        anchors = [Anchor(j, t, self.predict(h)) for j, turns in enumerate(after) for t, (_, h) in enumerate(turns)]
        budget = self.budget(ctx) - sum(len(g.rollouts) for g in ctx.started)
        counts = self.allocate_anchors(anchors, [self._succeeded(r) for _, r in rows], budget)
        new: list[Rollout] = []
        for anchor, n in zip(anchors, counts, strict=True):
            g, r = rows[anchor.rollout]
            new += g.fork(r, after[anchor.rollout][anchor.turn][0], n)
        continued = ctx.metrics.get("allocator/trace_tree_continued", 0.0)
        ctx.log("allocator/trace_tree_continued", continued + len(new))
        return new

    def observe(self, groups: list[Group], ctx: Context) -> None:
        """One step of the predictor towards the mean success through each node."""
        seen: list[tuple[Tensor, float]] = []
        for g in (g for g in groups if TREE in g.extras):
            features = g.extras[TREE]
            targets = backup(*self.tree(g))
            nodes = {"root": features.prompt} | {
                (slot, t): h for slot, turns in features.after.items() for t, (_, h) in enumerate(turns)
            }
            seen += [(h, targets[node][0]) for node, h in nodes.items() if node in targets]
        if seen:
            x = torch.stack([h for h, _ in seen])
            y = torch.tensor([value for _, value in seen], dtype=x.dtype)
            self._learn(x, y)
            ctx.log("allocator/trace_tree_error", float(((x @ self._weight(x) + self.bias).sigmoid() - y).abs().mean()))

    def budget(self, ctx: Context) -> int:
        """Rollouts of the step."""
        return ctx.group_size * len(ctx.started) if self.total_rollouts is None else self.total_rollouts

    def predict(self, hidden: Tensor) -> float:
        """Predicted success after a prefix."""
        return float((hidden @ self._weight(hidden) + self.bias).sigmoid())

    def turn_ends(self, r: Rollout) -> list[int]:
        """Positions of the first tokens of all turns but the first: where each turn but the last has ended."""
        return starts_after_tokens(r, self.boundary_tokens) if self.boundary_tokens else starts_after_tools(r)

    def allocate_roots(self, values: Sequence[float], budget: int) -> list[int]:
        """Stage 1: rollouts of each prompt."""
        if budget < self.min_per_prompt * len(values):
            raise DataError(
                f"allocator trace_tree: {budget} rollouts in the first stage are fewer than min_per_prompt="
                f"{self.min_per_prompt} for each of {len(values)} prompts; raise first_wave or total_rollouts"
            )
        known = [_known(v) for v in values]
        most = math.inf if self.max_per_prompt is None else self.max_per_prompt
        start = [self.min_per_prompt] * len(values)
        return greedy(lambda i, m: root_gain(known[i], m), start, most, budget - sum(start), least=0.0)

    def allocate_anchors(self, anchors: Sequence[Anchor], succeeded: Sequence[bool], budget: int) -> list[int]:
        """Stage 2: continuations of each anchor."""
        agree = [_agreement(_known(a.value), succeeded[a.rollout]) for a in anchors]
        start = [0] * len(anchors)
        return greedy(lambda i, k: agree[i] ** k * (1 - agree[i]), start, self.max_branches, budget, least=1e-12)

    def tree(self, group: Group) -> tuple[dict[Hashable, list[Hashable]], dict[Hashable, float]]:
        """Children of every node, and the success of every leaf: "root", (slot, turn), and slots."""
        after = group.extras[TREE].after
        children: dict[Hashable, list[Hashable]] = {"root": []}
        success: dict[Hashable, float] = {r.slot: float(self._succeeded(r)) for r in group.done() if r.scorable}
        for r in group.done():
            if r.slot not in success or r.forked is not None:
                continue
            path = ["root", *((r.slot, t) for t in range(len(after.get(r.slot, []))))]
            for above, below in zip(path, [*path[1:], r.slot]):
                children.setdefault(above, []).append(below)
        for r in group.done():
            if r.slot in success and r.forked is not None:
                slot, at = r.forked
                turns = [place for place, _ in after.get(slot, [])]
                children.setdefault((slot, turns.index(at)) if at in turns else "root", []).append(r.slot)
        return children, success

    def _learn(self, x: Tensor, y: Tensor) -> None:
        error = (x @ self._weight(x) + self.bias).sigmoid() - y
        self.weight = (self._weight(x) - self.learning_rate * (error @ x) / len(x)).tolist()
        self.bias -= self.learning_rate * float(error.mean())

    def _weight(self, hidden: Tensor) -> Tensor:
        size = hidden.shape[-1]
        if not self.weight:
            return hidden.new_zeros(size)
        return torch.tensor(self.weight, dtype=hidden.dtype)

    def _succeeded(self, r: Rollout) -> bool:
        return r.reward is not None and r.reward > self.success_threshold


def root_gain(value: float, m: int) -> float:
    """What rollout m+1 adds to the chance that the rollouts of a prompt are not all equal."""
    return value**m * (1 - value) + (1 - value) ** m * value


def backup(
    children: Mapping[Hashable, Sequence[Hashable]], leaf: Mapping[Hashable, float]
) -> dict[Hashable, tuple[float, int]]:
    """(mean of the leaves below it, their number) of every inner node that has any."""
    found: dict[Hashable, tuple[float, int]] = {}

    def below(node: Hashable) -> tuple[float, int]:
        if node not in children:
            return (leaf[node], 1) if node in leaf else (0.0, 0)
        parts = [below(child) for child in children[node]]
        n = sum(count for _, count in parts)
        value = sum(x * count for x, count in parts) / n if n else 0.0
        if n:
            found[node] = (value, n)
        return value, n

    inner = {child for row in children.values() for child in row}
    for node in children:
        if node not in inner:
            below(node)
    return found


def _agreement(value: float, succeeded: bool) -> float:
    """q: the chance that a continuation ends as the rollout did."""
    return value if succeeded else 1 - value


def _known(value: float) -> float:
    """The prediction in [0, 1]; 1/2 where there is none."""
    return 0.5 if math.isnan(value) else min(max(value, 0.0), 1.0)


def _prefix(r: Rollout, at: int) -> Rollout:
    """The rollout's first `at` tokens."""
    group = Group(r.group, r.prompt_key, list(r.prompt), r.max_tokens)
    (prefix,) = group.fork(r, at, 1)
    return prefix


def _detached(hidden: Tensor) -> Tensor:
    return hidden.detach().to("cpu", torch.float64)
