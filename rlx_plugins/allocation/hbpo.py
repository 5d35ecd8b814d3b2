"""HBPO: the rollouts of a prompt are told different token budgets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..core.context import Context
from ..core.errors import ConfigError
from ..core.kinds import Allocator
from ..core.params import param
from ..core.registry import register
from ..core.state import state
from ..core.trajectory import Group, Rollout, Segment


@register("allocator", "hbpo")
@dataclass
class HBPO(Allocator):
    """Splits the group of a prompt into subgroups, each told another token budget at the start of its reasoning, so
    that short and long answers are explored in every group.

    Of group_size rows each of the k budgets, ascending, gets floor(group_size / k); the others go to the budgets from
    the q-th on, q the number of prompts started in the run so far, so that over k prompts all get equally many. Rows of
    the smallest budget come first. A row carries the columns budget (tokens) and subgroup (its place among budgets),
    which `reward: hbpo` and `advantage: hbpo` read.

    `prefixes` are token ids, for each budget those of the sentence that states it, with the opening tag of the
    reasoning before them; they stand at the beginning of the response as a hint and are not trained. At deployment no
    budget is told.

    What is left of a group that the budgets do not divide is reconstructed.
    """

    paper = "Hierarchical Budget Policy Optimization for Adaptive Reasoning, arXiv 2507.15844"
    capabilities = frozenset({"continue"})
    provides = frozenset({"budget", "subgroup"})

    prefixes: tuple[tuple[int, ...], ...] = param(doc="per budget, the token ids that state it in the response")
    budgets: tuple[int, ...] = param((512, 1024, 2048, 2560), ge=1, doc="token budgets; the paper's")

    prompts: int = state(0)

    def check(self) -> None:
        if not self.budgets or len(set(self.budgets)) < len(self.budgets):
            raise ConfigError(f"allocator hbpo.budgets: expected different budgets, got {self.budgets}")
        if len(self.prefixes) != len(self.budgets):
            raise ConfigError(
                f"allocator hbpo.prefixes: expected one for each of {len(self.budgets)} budgets, got"
                f" {len(self.prefixes)}"
            )

    def more(self, idle: list[Group], ctx: Context) -> list[Rollout]:
        new: list[Rollout] = []
        told = self._told()
        for g in (g for g in idle if not g.rollouts):
            for r, k in zip(g.start(ctx.group_size), self.subgroups(ctx.group_size, self.prompts), strict=True):
                budget = sorted(self.budgets)[k]
                prefix = told[budget][: max(r.max_tokens - 1, 0)]
                r.segments = [Segment(list(prefix), "hint")] if prefix else []
                r.extras |= {"budget": budget, "subgroup": k}
                new.append(r)
            self.prompts += 1
        return new

    def subgroups(self, group_size: int, prompt: int) -> list[int]:
        """For each row of the run's `prompt`-th prompt the place of its budget among the budgets, ascending."""
        k = len(self.budgets)
        base, rest = divmod(group_size, k)
        count = [base] * k
        for j in range(rest):
            count[(prompt + j) % k] += 1
        return [i for i, n in enumerate(count) for _ in range(n)]

    def _told(self) -> Mapping[int, tuple[int, ...]]:
        return dict(zip(self.budgets, self.prefixes, strict=True))
