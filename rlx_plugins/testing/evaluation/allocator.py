"""Function forms of the allocators: the rollout program on a scripted executor."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from ...allocation.pilot_commit import PILOTS, PilotCommit
from ...allocation.vigor import ROUND, reward_variance
from ...core.config import Parts
from ...core.context import Context
from ...core.errors import DataError
from ...core.kinds import Sampler
from ...core.params import param
from ...core.registry import create
from ...core.rollout import drive, rollout_program
from ...core.trajectory import Group, Rollout
from ..scripted import ScriptedExecutor, table
from .allocator_plans import FORMS as PLAN_FORMS
from .allocator_rounds import FORMS as ROUND_FORMS
from .allocator_trees import FORMS as TREE_FORMS
from .building import only_given

Result = dict[str, Any]


def vigor(
    reward_table,
    m0=2,
    rounds=4,
    alpha=0.5,
    gamma=2.0,
    max_total=None,
    pareto_k=2.0,
    first_wave=None,
    survivors=None,
    growth=None,
    total_rollouts=None,
) -> Result:
    given = only_given(first_wave=first_wave, survivors=survivors, growth=growth, total_rollouts=total_rollouts)
    own = {"first_wave": m0, "rounds": rounds, "survivors": alpha, "growth": gamma, "total_rollouts": max_total} | given
    part = create("allocator", "vigor", **own)
    rewards = {str(x): [math.nan if r is None else r for r in row] for x, row in enumerate(reward_table)}
    ctx = Context(0, 1, len(rewards), own["first_wave"], 1, {key: [] for key in rewards}, offered=list(rewards))
    scripted = table(rewards)
    executor = ScriptedExecutor(lambda r: scripted(r) if rewards[r.prompt_key] else None)
    drive(rollout_program(Parts({"allocator": [part]}), ctx), executor)
    log = []
    for t, launched in enumerate(executor.launched):
        active = [g for g in ctx.started if g.extras[ROUND] >= t]
        so_far = [_until(g, t) for g in active]
        log.append(
            {
                "active": [int(g.prompt_key) for g in active],
                "drawn": [sum(r.group == g.id for r in launched) for g in active],
                "variance": [reward_variance(g) for g in so_far],
            }
        )
    counts = [len(g.rollouts) for g in ctx.started]
    eta = part.predicted_efficiency(pareto_k)
    return {
        "counts": counts,
        "total": sum(counts),
        "rounds": log,
        "eta": eta,
        "speedup": eta ** (1 / 3),
        "planned_per_prompt": part.planned_per_prompt(),
    }


def _until(group: Group, wave: int) -> Group:
    """The group as it was after its rollouts of `wave`."""
    rollouts = [r for r in group.rollouts if r.wave <= wave]
    return Group(group.id, group.prompt_key, [], rollouts=rollouts)


class _RoundsOver(Exception):
    """The script has no further round."""


class _Script:
    """The rounds of pilot_commit's function form, and what came of each."""

    def __init__(self, rounds: Any):
        self.rounds = list(rounds)
        self.names = {str(p): p for r in rounds for p in r["prompts"]}
        self.solved: dict[str, int] = {}
        self.log: list[dict[str, Any]] = []
        self.pilots_from: int | None = None

    def open(self, part: PilotCommit, committed: list[Group], ctx: Context) -> None:
        current = self.rounds.pop(0)
        self.solved = dict(zip(map(str, current["prompts"]), current["successes"]))
        self.pilots_from = len(ctx.started)
        entries = [g.extras[PILOTS] for g in committed]
        kept = [[p["reward"] for p in part.kept_pilots(e)] for e in entries]
        self.log.append(
            {
                "committed": self.prompts(entries),
                "lag": [ctx.step - e["step"] for e in entries],
                "pilot_kept": [[row.count(1.0), row.count(0.0)] for row in kept],
            }
        )

    def close(self, part: PilotCommit, ctx: Context, flushed: list[Any], trained: dict[str, Any] | None) -> None:
        if self.pilots_from is None:
            return
        pilots = [g for g in ctx.started[self.pilots_from :] if g.prompt_key in self.names]
        self.pilots_from = None
        verdicts = [(g.prompt_key, part.verdict(part.success_rate(g.rollouts) or 0.0)) for g in pilots]
        for verdict in ("passed", "too_easy", "too_hard"):
            self.log[-1][verdict] = [self.names[key] for key, v in verdicts if v == verdict]
        self.log[-1] |= {
            "buffer": self.prompts(part.buffer),
            "flushed": flushed,
            "rollouts": sum(len(g.rollouts) for g in pilots) + len(self.log[-1]["committed"]) * part.n_commit,
            "trained": trained,
        }

    def reward(self, r: Rollout) -> float:
        """The first rollouts of a prompt solve it; one that stands in for a round without prompts can't be scored."""
        return float(r.slot < self.solved.get(r.prompt_key, 0)) if r.prompt_key in self.names else math.nan

    def prompts(self, entries: list[dict[str, Any]]) -> list[Any]:
        return [self.names[e["prompt_key"]] for e in entries]


@dataclass
class _WatchedPilots(PilotCommit):
    """The allocator; the script is told when a round begins and what the end of a step flushes."""

    def intake(self, need: int, ctx: Context) -> tuple[list[Group], int]:
        self.script.close(self, ctx, [], None)
        if not self.script.rounds:
            raise _RoundsOver
        groups, n = super().intake(need, ctx)
        self.script.open(self, groups, ctx)
        return groups, n

    def observe(self, groups: list[Group], ctx: Context) -> None:
        before = self.buffer
        super().observe(groups, ctx)
        self.flushed = self.script.prompts([e for e in before if all(e is not b for b in self.buffer)])


@dataclass
class _ScriptedPrompts(Sampler):
    """The prompts of the script's current round."""

    kind, name = "sampler", "scripted"

    script: Any = param()

    def draw(self, n: int, ctx: Context) -> list[str]:
        return list(self.script.solved) or ["unused 0"]


def pilot_commit(
    rounds,
    n_pilot=8,
    n_effective=None,
    n_commit=24,
    train_bsz=2,
    lower=0.125,
    upper=0.25,
    exclude=1.0,
    max_off_steps=4,
    order="max_variance",
    max_rounds=10,
    max_age=None,
) -> Result:
    script = _Script(rounds)
    # An epoch is as many prompts as the data set has, and the function form knows no epochs.
    unused = sum(len(r["prompts"]) for r in rounds) + 1
    prompts: dict[str, list[int]] = {key: [] for key in [*script.names, *(f"unused {i}" for i in range(unused))]}
    part = _WatchedPilots(
        n_pilot=n_pilot,
        n_commit=n_commit,
        n_effective=n_effective,
        lower=lower,
        upper=upper,
        exclude=exclude,
        order=order,
        max_age=max_off_steps if max_age is None else max_age,
        max_rounds=max_rounds or 0,
    )
    part.script = script
    parts = Parts({"allocator": [part], "sampler": [_ScriptedPrompts(script)]})
    status, step = "running", 0
    while status == "running":
        ctx = Context(step, step + 1, train_bsz, n_pilot, 1, prompts)
        try:
            ready = drive(rollout_program(parts, ctx), ScriptedExecutor(script.reward))
        except _RoundsOver:
            break
        except DataError:
            status = "too_many_rounds"
            break
        step += 1
        size = (n_pilot if n_effective is None else n_effective) + n_commit
        trained = {"step": step, "prompts": [script.names[g.prompt_key] for g in ready], "group_size": size}
        script.close(part, ctx, part.flushed, trained)
    return {
        "log": script.log,
        "excluded": sorted(script.names[key] for key in part.excluded + part.excluded_next),
        "status": status,
        "steps_done": step,
    }


FORMS = {"pilot_commit": pilot_commit, "vigor": vigor, **PLAN_FORMS, **ROUND_FORMS, **TREE_FORMS}
