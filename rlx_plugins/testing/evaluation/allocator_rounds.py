"""Function forms of the allocators that give out rollouts in rounds: the rollout program on a scripted executor."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...allocation.aero import STRATUM
from ...allocation.v05 import prior_error
from ...allocation.xrpo import XRPO, has_positive_reward, reward_std
from ...core.batch import pack
from ...core.config import Parts
from ...core.context import Context
from ...core.kinds import Allocator
from ...core.registry import create
from ...core.rollout import drive, rollout_program
from ...core.trajectory import Group, Rollout
from ..scripted import Rewards, ScriptedExecutor
from .building import reward_batch, tensor

Result = dict[str, Any]


@dataclass
class Step:
    """A step of the program with one allocator: its context, what the executor was asked, and the training groups."""

    ctx: Context
    executor: ScriptedExecutor
    ready: dict[str, Group]

    @property
    def groups(self) -> list[Group]:
        """Every group of the step, as it was before rows were rejected."""
        return self.ctx.started


def run_step(
    part: Allocator,
    prompts: int,
    reward: Rewards,
    *,
    columns: Callable[[str], Mapping[str, Any]] = lambda key: {},
    injected: Mapping[tuple[Any, ...], float] | None = None,
    **executor: Any,
) -> Step:
    """One step on the prompts "0", "1", ..., whose groups are "0#0.0", "1#0.1", ..."""
    keys = [str(i) for i in range(prompts)]
    max_tokens = executor.pop("max_tokens", 1)
    groups, group_size = executor.pop("groups", prompts), executor.pop("group_size", 8)
    ctx = Context(0, 1, groups, group_size, max_tokens, {k: [] for k in keys}, keys, columns=columns)
    ctx.injected |= injected or {}
    scripted = ScriptedExecutor(reward, **executor)
    ready = drive(rollout_program(Parts({"allocator": [part]}), ctx), scripted)
    return Step(ctx, scripted, {g.prompt_key: g for g in ready})


def reward_rows(table: Any) -> Rewards:
    """Rewards by prompt and slot; NaN beyond the end of a prompt's row, and for None."""
    rows = [[math.nan if x is None else float(x) for x in row] for row in table]
    return lambda r: rows[int(r.prompt_key)][r.slot] if r.slot < len(rows[int(r.prompt_key)]) else math.nan


def aero(
    reward_table,
    keep_key,
    n_explore=4,
    n_extra=2,
    u_res=0.0,
    u_high=0.5,
    neg_per_pos=1.0,
    n_budget=None,
    per_prompt_cap=16,
    n_homogeneous=4,
    **given,
) -> Result:
    own = {
        "first_wave": n_explore,
        "extra": n_extra,
        "rescue_below": u_res,
        "high_from": u_high,
        "neg_per_pos": neg_per_pos,
        "total_rollouts": n_budget,
        "max_per_prompt": per_prompt_cap,
        "n_homogeneous": n_homogeneous,
    }
    part = create("allocator", "aero", **(own | given))
    keys = {("aero/keep", f"{i}#0.{i}", j): key for i, row in enumerate(keep_key) for j, key in enumerate(row)}
    step = run_step(part, len(reward_table), reward_rows(reward_table), injected=keys)
    rounds = [
        [[int(g.prompt_key), n] for g in step.groups if (n := sum(r.group == g.id for r in launched))]
        for launched in step.executor.launched[1:]
    ]
    kept = [step.ready[g.prompt_key].rollouts if g.prompt_key in step.ready else [] for g in step.groups]
    counts = [part.counts(g) for g in step.groups]
    used = [len(g.rollouts) for g in step.groups]
    return {
        "stratum": [g.extras[STRATUM] for g in step.groups],
        "used": used,
        "rescue_rounds": rounds,
        "budget_left": part.budget_left(step.ctx),
        "keep": [[r.slot for r in rows] for rows in kept],
        "status": [part.status(g) for g in step.groups],
        "n_success": [c for c, _ in counts],
        "n_total": [n for _, n in counts],
        "generated": sum(used),
        "trained": sum(map(len, kept)),
    }


def v05(streams, prior, k_init=4, k_max=16, cost=1 / 256, binary01=False, **given) -> Result:
    own = {"first_wave": k_init, "max_per_prompt": k_max, "cost": cost, "prior": "prior"} | given
    part = create("allocator", "v05", **own)
    credit = create("advantage", "v05", prior="prior", reward_min=part.reward_min, reward_max=part.reward_max)
    priors = [_mapped(v, binary01) for v in tensor(prior).tolist()]
    rows = [[_mapped(x, binary01) for x in tensor(row).tolist()] for row in streams]

    def reward(r: Rollout) -> float | None:
        """None, a rollout that never finishes, where the stream has no number."""
        row = rows[int(r.prompt_key)]
        return row[r.slot] if r.slot < len(row) and not math.isnan(row[r.slot]) else None

    step = run_step(part, len(rows), reward, columns=lambda key: {"prior": priors[int(key)]})
    batch = pack(list(step.ready.values()), dtype=tensor([]).dtype)
    batch = batch.with_columns(prior=tensor([priors[int(key)] for key in batch.prompt_key]))
    columns = credit(batch)
    per_prompt: dict[str, list[int]] = {g.prompt_key: [] for g in step.groups}
    for i, key in enumerate(batch.prompt_key):
        per_prompt[key].append(i)
    chosen = per_prompt.values()
    return {
        "k": [len(members) for members in chosen],
        "delta2": [_error(g.rewards(), priors[int(g.prompt_key)]) for g in step.groups],
        "weight": [_first(columns["weight"], members) for members in chosen],
        "baseline": [_first(columns["baseline"], members) for members in chosen],
        "advantages": [columns["advantages"][members, 0].tolist() for members in chosen],
        "stop": [part.stop(g) for g in step.groups],
        "total": sum(map(len, chosen)),
    }


def _mapped(x: float, binary01: bool) -> float:
    return 2 * x - 1 if binary01 else x


def _error(rewards: Sequence[float], prior: float) -> float:
    return prior_error(rewards, prior) if rewards and not math.isnan(prior) else math.nan


def _first(column: Any, members: list[int]) -> float:
    return float(column[members[0]]) if members else math.nan


def xrpo(rewards, budget_per_round, pools, conf=0.05, lam=0.1, n_cap=None, **given) -> Result:
    budgets = [int(b) for b in budget_per_round]
    log: list[Result] = []

    @dataclass
    class GivenBudgets(XRPO):
        """The allocator with its base phase and the rounds' budgets given; it writes down every round."""

        def base(self, group: Group) -> int:
            return len(rewards[int(group.prompt_key)])

        def budget(self, round_: int, drawn: int, ctx: Context) -> int:
            return budgets[round_]

        def assign(self, groups: list[Group], budget: int, drawn: int) -> list[int]:
            entry = {
                "n": [len(g.rollouts) for g in groups],
                "std": [reward_std(g) for g in groups],
                "priority": self.priorities(groups, drawn),
                "add": super().assign(groups, budget, drawn),
            }
            log.append(entry)
            return entry["add"]

    own = {"outside": conf, "bonus_coef": lam, "max_per_prompt": n_cap, "rounds": max(1, len(budgets)), "first_wave": 2}
    part = GivenBudgets(**(own | given))
    budgets = budgets or [0]
    step = run_step(part, len(rewards), reward_rows([[*a, *b] for a, b in zip(rewards, pools, strict=True)]))
    return {
        "rounds": log[: len(budget_per_round)],
        "counts": [len(g.rollouts) for g in step.groups],
        "zero_reward": [int(g.prompt_key) for g in step.groups if not has_positive_reward(g)],
    }


def ar3po(reward_table, stages=2, per_stage=4, correct_at=1.0, **given) -> Result:
    own = {"stages": stages, "per_stage": per_stage, "correct_at": correct_at}
    part = create("allocator", "ar3po", **(own | given))
    step = run_step(part, len(reward_table), reward_rows(reward_table))
    counts = [len(g.rollouts) for g in step.groups]
    return {
        "active": [[i for i, n in enumerate(counts) if n > s * part.per_stage] for s in range(part.stages)],
        "counts": counts,
        "solved": [part.solved(g) for g in step.groups],
        "mixed": [len({0.0 if math.isnan(x) else x for x in g.rewards()}) > 1 for g in step.groups],
        "mean_count": sum(counts) / len(counts) if counts else 0.0,
        "needs_reuse": [i for i, g in enumerate(step.groups) if not part.solved(g)],
    }


def dars(
    rewards_stage1, rewards_stage2, n_max=32, schedule="ET", use_std=False, upper_threshold=1.0, **given
) -> Result:
    first = max(map(len, rewards_stage1), default=1)
    own = {"max_per_prompt": n_max, "schedule": schedule, "use_std": use_std, "upper_threshold": upper_threshold}
    part = create("allocator", "dars", **({"first_wave": first} | own | given))
    missing = [first - len(row) for row in rewards_stage1]
    table = [[*a, *[None] * m, *b] for a, m, b in zip(rewards_stage1, missing, rewards_stage2, strict=True)]
    step = run_step(part, len(table), reward_rows(table))
    pooled = [[x for x in g.rewards() if not math.isnan(x)] for g in step.groups]
    extra = [sum(r.wave > 0 for r in g.rollouts) for g in step.groups]
    credit = create("advantage", "grpo", scale="group" if use_std else "none", ddof=0, eps=1e-12)
    return {
        "extra": extra,
        "group_size": [len(rewards) for rewards in pooled],
        "acc_stage1": [_mean([x for x in g.rewards()[:first] if not math.isnan(x)]) for g in step.groups],
        "acc_total": [_mean(rewards) for rewards in pooled],
        "keep": [g.prompt_key in step.ready for g in step.groups],
        "abs_advantage_mass": [
            float(credit(reward_batch(rewards))["advantages"].abs().sum()) if rewards else 0.0 for rewards in pooled
        ],
        "second_stage_total": sum(extra),
    }


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else math.nan


def orchard_bar(streams, size=8, n_max=16, stride=16, rho_min=0.375, rho_max=0.625, **given) -> Result:
    own = {"size": size, "max_per_prompt": n_max, "stride": stride, "share_low": rho_min, "share_high": rho_max}
    part = create("allocator", "orchard_bar", **(own | given))
    longest = 1 + max((int(t["length"]) for row in streams for t in row), default=0)

    def reward(r: Rollout) -> float | None:
        """The trajectory of the stream; the executor lets every rollout run to its bound or its own end."""
        t = streams[int(r.prompt_key)][r.slot]
        r.stop = "length" if t["status"] == "truncated" else "eos"
        unknown = t["reward"] is None or t["status"] == "aborted"
        return math.nan if unknown else float(t["reward"])

    def length(r: Rollout) -> int:
        row = streams[int(r.prompt_key)]
        return int(row[r.slot]["length"]) if r.slot < len(row) else longest

    step = run_step(part, len(streams), reward, length=length, max_tokens=longest)
    pools = [part.trajectories(g) for g in step.groups]
    found = [part.assemble(pool) for pool in pools]
    return {
        "group": [f.members for f in found],
        "generated": [len(g.rollouts) for g in step.groups],
        "stage": [f.stage for f in found],
        "positives": [
            sum((row[i]["reward"] or 0) > 0 for i in f.members) for row, f in zip(streams, found, strict=True)
        ],
        "usable": [part.usable([pool[i] for i in f.members]) for pool, f in zip(pools, found, strict=True)],
    }


def far(
    reward_table,
    finish_time,
    target_groups,
    n_base=4,
    n_max=8,
    n_step=2,
    expand=2,
    max_prompts=None,
    complete_frac=0.99,
    train_size=4,
    **given,
) -> Result:
    own = {
        "first_wave": n_base,
        "max_per_prompt": n_max,
        "extra": n_step,
        "expand": expand,
        "max_prompts": max_prompts,
        "finish_share": complete_frac,
        "train_size": train_size,
    }
    part = create("allocator", "far", **(own | given))
    times = [tensor(row).tolist() for row in finish_time]
    ranks = {t: 1 + i for i, t in enumerate(sorted({t for row in times for t in row}))}

    def length(r: Rollout) -> int:
        return ranks[times[int(r.prompt_key)][r.slot]]

    step = run_step(
        part,
        len(reward_table),
        reward_rows(reward_table),
        groups=int(target_groups),
        length=length,
        max_tokens=2 + len(ranks),
    )
    rows = {(g.id, r.slot): r for g in step.groups for r in g.rollouts}
    waves = []
    for launched in step.executor.launched:
        ended = [times[int(r.prompt_key)][r.slot] for r in launched if rows[r.group, r.slot].state == "finished"]
        waves.append({"issued": len(launched), "finished": len(ended), "time": max(ended)})
    informative = [g for g in step.groups if part.is_informative(g)]
    return {
        "groups": {g.prompt_key: [len(g.rollouts), [r.slot for r in g.done()]] for g in step.groups},
        "informative": [int(g.prompt_key) for g in informative],
        "train": {key: [r.slot for r in g.rollouts] for key, g in step.ready.items()},
        "late": [[int(g.prompt_key), r.slot] for g in step.groups for r in g.rollouts if r.state == "pruned"],
        "waves": waves,
        "clock": sum(wave["time"] for wave in waves),
        "prompts_used": len(step.groups),
    }


FORMS = {form.__name__: form for form in (aero, v05, xrpo, ar3po, dars, orchard_bar, far)}
