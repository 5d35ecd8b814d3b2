"""ReSum: partners of the first rollouts, with and without a summary after the same prefix."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from ..advantages.resum import positions
from ..core.context import Context
from ..core.errors import ConfigError
from ..core.kinds import Allocator
from ..core.params import param
from ..core.registry import register
from ..core.trajectory import Group, Rollout, Segment
from ._steps import from_model

PLAN = "resum_plan"
"""Entry of `group.extras`: the `Branch`es of the group."""


class Branch(NamedTuple):
    """One rollout of the plan: the root it belongs to, how it is made, and after how many of the root's tokens."""

    tree: int
    kind: Literal["root", "natural", "artificial"]
    at: int


@register("allocator", "resum")
@dataclass
class ReSum(Allocator):
    """Every root rollout gets partners that share a prefix with it: where it began a summary by itself, one that may
    not; elsewhere, one in which the summary's phrase is written at a random position.

    For partner j = 1 .. per_tree - 1 of each tree in turn: at the earliest place not used yet where the root begins the
    phrase, keep the tokens before it and ban the phrase's first token there ("natural"); else, at a uniform place in
    [min_prefix, length) that is not one of these, keep the tokens before it and write the phrase, untrained, as a hint
    ("artificial"); else start anew from the prompt. Partners never start from partners.

    `phrase` is token ids: those of a short lead-in such as "Let me summarise". `advantage: resum` compares rollouts
    with a summary among themselves (`method: resum`). A natural partner may begin a summary one token later; its first
    token is trained as if nothing had been banned.

    Places are tokens the model wrote itself and, deviation, leave it at least one token after the phrase.
    Reconstructed: the order of partners, the uniform choice.
    """

    paper = "ReSum, arXiv 2606.13316"
    capabilities = frozenset({"rounds", "continue", "ban_tokens"})

    phrase: tuple[int, ...] = param(doc="token ids that begin a summary")
    trees: int = param(4, ge=1, doc="root rollouts of a prompt; the paper's T = 4")
    per_tree: int = param(4, ge=1, doc="rollouts of a tree, root included; the paper's J = 4")
    min_prefix: int = param(1, ge=0, doc="tokens of the root before an artificial summary; reconstructed")

    def check(self) -> None:
        if not self.phrase:
            raise ConfigError("allocator resum.phrase: expected at least one token id")

    def more(self, idle: list[Group], ctx: Context) -> list[Rollout]:
        new: list[Rollout] = []
        for g in idle:
            if not g.rollouts:
                new += g.start(self.trees)
            elif PLAN not in g.extras:
                new += self._partners(g, ctx)
        return new

    def _partners(self, group: Group, ctx: Context) -> list[Rollout]:
        roots = group.rollouts[: self.trees]
        natural = [self.natural_points(r) for r in roots]
        open_ = [self.candidates(r, points) for r, points in zip(roots, natural, strict=True)]
        plan = self.plan(natural, open_, lambda tree, j: self.uniform(ctx, group.id, tree, j))
        group.extras[PLAN] = plan
        return [self._branch(group, roots[b.tree], b) for b in plan[len(roots) :]]

    def _branch(self, group: Group, root: Rollout, branch: Branch) -> Rollout:
        if branch.kind == "root":
            (new,) = group.start(1)
            return new
        (new,) = group.fork(root, branch.at, 1)
        if branch.kind == "natural":
            new.banned = [self.phrase[0]]
        else:
            new.segments.append(Segment(list(self.phrase), "hint"))
        return new

    def plan(
        self,
        natural: Sequence[Sequence[int]],
        candidates: Sequence[Sequence[int]],
        draw: Callable[[int, int], float],
    ) -> list[Branch]:
        """The rollouts of a group, roots first.

        natural     per tree, where the root begins the phrase, ascending
        candidates  per tree, where the phrase may be written, ascending
        draw        a uniform number for tree t and partner j
        """
        trees = range(len(natural))
        plan = [Branch(t, "root", 0) for t in trees]
        for j in range(1, self.per_tree):
            for t in trees:
                if j <= len(natural[t]):
                    plan.append(Branch(t, "natural", natural[t][j - 1]))
                elif candidates[t]:
                    chosen = candidates[t][math.floor(draw(t, j) * len(candidates[t]))]
                    plan.append(Branch(t, "artificial", chosen))
                else:
                    plan.append(Branch(t, "root", 0))
        return plan

    def natural_points(self, root: Rollout) -> list[int]:
        """Where the model begins the phrase by itself."""
        found: list[int] = []
        tokens, own = root.tokens, from_model(root)
        start = 0
        for end in range(len(tokens) + 1):
            if end == len(tokens) or not own[end]:
                found += [start + i for i in positions(tokens[start:end], self.phrase)]
                start = end + 1
        return found

    def candidates(self, root: Rollout, natural: Sequence[int]) -> list[int]:
        """Where the phrase may be written: model tokens, none of them a natural point."""
        if root.state != "finished":
            return []
        own = from_model(root)
        last = min(len(own), root.max_tokens - len(self.phrase))
        return [i for i in range(self.min_prefix, last) if own[i] and i not in natural]

    def uniform(self, ctx: Context, *keys: object) -> float:
        return ctx.uniform("resum/place", *keys)
