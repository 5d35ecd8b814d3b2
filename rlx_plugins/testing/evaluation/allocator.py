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
from ...core.registry import create
from ...core.rollout import drive, rollout_program
from ...core.trajectory import Group, Rollout
from ..scripted import ScriptedExecutor, table
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
    executor = ScriptedExecutor(table(rewards))
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
    names = {str(p): p for r in rounds for p in r["prompts"]}
    prompts: dict[str, list[int]] = {key: [] for key in names}
    # An epoch is as many prompts as the data set has; the function form knows no epochs.
    prompts |= {f"never drawn {i}": [] for i in range(sum(len(r["prompts"]) for r in rounds) + 1)}
    script = iter(rounds)
    log: list[dict[str, Any]] = []
    solved: dict[str, int] = {}

    @dataclass
    class Watched(PilotCommit):
        """The allocator, noting at the beginning of each round what the one before has done."""

        def intake(self, need: int, ctx: Context) -> tuple[list[Group], int]:
            finish_round(self, ctx)
            groups, n = super().intake(need, ctx)
            current = next(script, None)
            if current is None:
                raise _RoundsOver
            solved.clear()
            solved.update(zip(map(str, current["prompts"]), current["successes"]))
            self.open = True
            self.first = len(ctx.started)
            entries = [g.extras[PILOTS] for g in groups]
            log.append(
                {
                    "committed": [names[e["prompt_key"]] for e in entries],
                    "lag": [ctx.step - e["step"] for e in entries],
                    "pilot_kept": [_right_and_wrong(self._kept_pilots(e["pilots"])) for e in entries],
                }
            )
            return groups, n

    @dataclass
    class Scripted(Sampler):
        def draw(self, n: int, ctx: Context) -> list[str]:
            return list(solved)

    Watched.kind, Watched.name, Scripted.kind, Scripted.name = "allocator", "pilot_commit", "sampler", "scripted"

    def finish_round(part: Any, ctx: Context, flushed: list[Any] | None = None, trained: Any = None) -> None:
        if not part.open:
            return
        part.open = False
        pilots = ctx.started[part.first :]
        rates = {g.prompt_key: part.success_rate(g.rollouts) for g in pilots}
        verdicts = {key: part.verdict(rate) for key, rate in rates.items()}
        log[-1] |= {name: [names[k] for k, v in verdicts.items() if v == name] for name in ("passed", "too_easy", "too_hard")}
        log[-1] |= {
            "buffer": [names[e["prompt_key"]] for e in part.buffer],
            "flushed": flushed or [],
            "rollouts": sum(len(g.rollouts) for g in pilots) + len(log[-1]["committed"]) * part.n_commit,
            "trained": trained,
        }

    def reward(r: Rollout) -> float:
        return float(r.group.count("/commit") == 0 and r.slot < solved[r.prompt_key])

    part = Watched(
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
    part.open = False
    status, step = "running", 0
    while True:
        ctx = Context(step, step + 1, train_bsz, n_pilot, 1, prompts)
        waiting: list[Any] = []
        try:
            program = rollout_program(Parts({"allocator": [part], "sampler": [Scripted()]}), ctx)
            ready = drive(program, ScriptedExecutor(reward))
        except _RoundsOver:
            break
        except DataError:
            status = "too_many_rounds"
            break
        step += 1
        size = (n_pilot if n_effective is None else n_effective) + n_commit
        trained = {"step": step, "prompts": [names[g.prompt_key] for g in ready], "group_size": size}
        finish_round(part, ctx, waiting, trained)
    return {
        "log": log,
        "excluded": sorted(names[key] for key in part.excluded + part.excluded_next),
        "status": status,
        "steps_done": step,
    }


def _right_and_wrong(pilots: list[dict[str, Any]]) -> list[int]:
    right = sum(p["reward"] == 1 for p in pilots)
    return [right, len(pilots) - right]


FORMS = {"pilot_commit": pilot_commit, "vigor": vigor}
