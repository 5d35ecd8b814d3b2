"""APRIL: start more groups than needed, stop when enough are complete, continue the others in the next step."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from ..core.context import Context
from ..core.kinds import Pruner
from ..core.params import param
from ..core.registry import register
from ..core.state import state
from ..core.trajectory import Group


@register("pruner", "april")
@dataclass
class April(Pruner):
    """Nobody waits for the longest responses: generation ends once the step's groups are complete, and every unfinished
    group is kept with its partial responses and continued first in the next step.

    Of R groups wanted, O = ceil(over_sampling * R) are under way: first those parked (oldest first), then new prompts.
    Groups that complete in the same instant as the R-th wait for the next step and then count towards R; they are
    marked `tag="surplus"`. Rows continued over a weight update have segments of several versions (`staleness`).

    Deviations: the release drops surplus groups, the paper says that nothing is discarded. With a sampler that refuses
    groups (a dynamic filter), as many prompts are started anew as groups are missing, not O.
    """

    paper = "APRIL: Active Partial Rollouts in Reinforcement Learning to Tame Long-tail Generation, arXiv 2509.18521"
    capabilities = frozenset({"until_group", "abort", "continue"})
    ends_generation = True

    over_sampling: float = param(2.0, ge=1, doc="groups under way per group wanted, O / R; the release's 64 / 32")
    recycle: bool = param(True, doc="continue unfinished groups; False: their tokens are wasted")
    max_age: int | None = param(None, ge=1, doc="drop unfinished groups started more steps ago than this; None: never")
    parked: list = state(factory=list)
    surplus: list = state(factory=list)

    def intake(self, need: int, ctx: Context) -> tuple[list[Group], int]:
        held, self.surplus = self.surplus[:need], self.surplus[need:]
        groups = [Group.from_plain(g) for g in held]
        if len(held) >= need:
            return groups, 0
        wanted = math.ceil(self.over_sampling * need - 1e-9)
        self.parked = [g for g in self.parked if g["prompt_key"] in ctx.prompts and self._young(g, ctx)]
        resumed, self.parked = self.parked[:wanted], self.parked[wanted:]
        groups += [Group.from_plain(g) for g in resumed]
        return groups, wanted - len(resumed)

    def enough(self, ready: list[Group], ctx: Context) -> bool:
        return len(ready) >= ctx.groups

    def close(self, left: list[Group], ctx: Context) -> None:
        wasted = 0
        for g in left:
            if g.idle and g.done():
                self.surplus.append(_held(g))
            elif self.recycle:
                g.extras.setdefault("april_born", ctx.step)
                self.parked.append(g.to_plain())
            else:
                wasted += sum(len(r) for r in g.rollouts)
        ctx.log("pruner/april_parked", len(self.parked))
        ctx.log("pruner/april_surplus", len(self.surplus))
        ctx.log("pruner/april_wasted_tokens", wasted)

    def _young(self, parked: dict[str, Any], ctx: Context) -> bool:
        return self.max_age is None or ctx.step - parked["extras"]["april_born"] <= self.max_age


def _held(group: Group) -> dict[str, Any]:
    """A complete group to be returned in a later step: no longer fresh, its controllers have been told."""
    saved = group.to_plain() | {"fresh": False}
    for r in saved["rollouts"]:
        r["tag"] = r["tag"] or "surplus"
    return saved
