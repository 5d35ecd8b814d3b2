"""Function forms of the allocators that fork rollouts: the rollout program on a scripted executor."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ...allocation.arpo import ARPO, SEARCH, Search
from ...allocation.arpo import Step as Fork
from ...allocation.datpo import DATPO
from ...allocation.ehpo import BRANCHES, EHPO, Event
from ...allocation.elpo import ELPO
from ...allocation.elpo import Search as ElpoSearch
from ...allocation.resum import PLAN, ReSum
from ...allocation.trace_tree import Anchor, backup
from ...core.context import Context
from ...core.registry import create
from ...core.trajectory import Rollout
from .allocator_rounds import run_step
from .building import tensor

Result = dict[str, Any]


def arpo(h_init, h_rounds, M=16, Z=1, alpha=0.5, beta=0.2, tau=0.5, stochastic=False, uniforms=None, **given) -> Result:
    start = tensor(h_init).tolist()
    rounds = [tensor(row).tolist() for row in h_rounds]
    stream = iter(uniforms or ())
    rows = {i: i for i in range(len(start))}

    @dataclass
    class GivenEntropies(ARPO):
        """The allocator with entropies, and the stream of its draws, given; a fork has those of its parent."""

        def measure(self, search: Search, r: Rollout, entropy: Sequence[float]) -> None:
            parent = r.forked[0] if r.forked else None
            row = rows.setdefault(r.slot, r.slot if r.slot < len(rounds) or parent is None else rows[parent])
            search.start.setdefault(r.slot, start[row] if row < len(start) else 0.0)
            steps = rounds[row] if row < len(rounds) else []
            search.steps[r.slot] = [Fork(i + 1, h) for i, h in enumerate(steps)]

        def uniform(self, ctx: Context, *keys: object) -> float:
            return super().uniform(ctx, *keys) if uniforms is None else next(stream)

    own = {
        "total_rollouts": M,
        "first_wave": len(start),
        "max_forks": Z,
        "base": alpha,
        "entropy_weight": beta,
        "threshold": tau,
        "stochastic": stochastic,
    }
    part = GivenEntropies(**(own | given))
    longest = 2 + max(map(len, rounds), default=0)
    step = run_step(part, 1, lambda r: 0.0, length=longest, max_tokens=longest + 1, forward=_no_entropies)
    (group,) = step.groups
    assert group.extras[SEARCH].over
    branches = [[r.forked[0], r.slot, r.forked[1] - 1] for r in group.rollouts if r.forked]
    return {
        "branches": branches,
        "n_fresh": len(group.rollouts) - len(start) - len(branches),
        "total": len(group.rollouts),
    }


def _no_entropies(operation: Any) -> list[list[float]]:
    return [[] for _ in operation.rollouts]


def resum(natural_points, length, J=4, draws=None, min_prefix=1, **given) -> Result:
    stream = iter(draws or ())

    @dataclass
    class GivenPlaces(ReSum):
        """The allocator with the roots' natural points, and the stream of its draws, given."""

        def natural_points(self, root: Rollout) -> list[int]:
            return [int(p) for p in natural_points[root.slot]]

        def uniform(self, ctx: Context, *keys: object) -> float:
            return super().uniform(ctx, *keys) if draws is None else next(stream)

    own = {"phrase": (0,), "trees": len(length), "per_tree": J, "min_prefix": min_prefix}
    part = GivenPlaces(**(own | given))
    step = run_step(
        part,
        1,
        lambda r: 0.0,
        length=lambda r: int(length[r.slot]) if r.slot < len(length) else 1,
        max_tokens=max(map(int, length), default=0) + 2,
    )
    (group,) = step.groups
    return {"plan": [list(branch) for branch in group.extras[PLAN]], "n_rollouts": len(group.rollouts)}


def elpo(
    root_rewards,
    tool_entropy,
    root_entropy,
    branch_outcomes,
    n_total=16,
    x_min=1,
    x_max=3,
    beta=5.0,
    success=1.0,
    **given,
) -> Result:
    rewards = tensor(root_rewards).tolist()
    after = [tensor(row).tolist() for row in tool_entropy]
    before = tensor(root_entropy).tolist()
    used: dict[tuple[int, int], int] = {}

    @dataclass
    class GivenEntropies(ELPO):
        """The allocator with the entropies of the roots' steps given; step m begins at token m."""

        def measure(self, search: ElpoSearch, r: Rollout, entropy: Sequence[float]) -> None:
            if after[r.slot]:
                search.starts[r.slot] = list(range(len(after[r.slot])))
                search.rise[r.slot] = [h - before[r.slot] for h in after[r.slot]]

    def reward(r: Rollout) -> float:
        """A root's own, or the next outcome of the step it was continued from."""
        if not r.forked:
            return rewards[r.slot] if r.slot < len(rewards) else 0.0
        step = r.forked
        used[step] = used.get(step, 0) + 1
        outcomes = branch_outcomes[step[0]][step[1]]
        return float(outcomes[used[step] - 1]) if used[step] <= len(outcomes) else 0.0

    own = {
        "total_rollouts": n_total,
        "first_wave": len(rewards),
        "x_min": x_min,
        "x_max": x_max,
        "sharpness": beta,
        "success_reward": success,
    }
    part = GivenEntropies(**(own | given))
    longest = 1 + max(map(len, after), default=0)
    step = run_step(part, 1, reward, length=longest, max_tokens=longest + 1, forward=_no_entropies)
    (group,) = step.groups
    waves: dict[tuple[int, int], list[Rollout]] = {}
    for r in group.rollouts:
        if r.forked:
            waves.setdefault(r.forked, []).append(r)
    branches = [
        [*step, len(rows), any(r.reward is not None and r.reward >= part.success_reward for r in rows)]
        for step, rows in waves.items()
    ]
    return {
        "branches": branches,
        "critical_step": part.search(group).critical,
        "unused": part.total_rollouts - len(group.rollouts),
    }


def datpo(base_rewards, entropy, sentence_starts, K_max=3, B_max=4, **given) -> Result:
    rewards = tensor(base_rewards).tolist()
    entropies = [tensor(row).tolist() for row in entropy]

    @dataclass
    class GivenSentences(DATPO):
        """The allocator with the beginnings of sentences given; it writes down its forks."""

        def starts(self, r: Rollout) -> list[int]:
            return [int(i) for i in sentence_starts[r.slot]] if len(r) else []

        def forks(self, r: Rollout, entropy: Sequence[float], k: int) -> list[int]:
            chosen[r.slot] = super().forks(r, entropy, k)
            return chosen[r.slot]

    chosen: dict[int, list[int]] = {}
    own = {"sentence_ends": (0,), "first_wave": len(rewards), "max_forks": K_max, "max_branches": B_max}
    part = GivenSentences(**(own | given))
    step = run_step(
        part,
        1,
        lambda r: rewards[r.slot] if r.slot < len(rewards) else 0.0,
        length=lambda r: len(entropies[r.slot]) if r.slot < len(rewards) else 1,
        max_tokens=1 + max(map(len, entropies), default=0),
        forward=lambda operation: [entropies[r.slot] for r in operation.rollouts],
    )
    (group,) = step.groups
    value, (k, branches) = part.value(group), part.spread(group)
    return {
        "V_root": math.nan if value is None else value,
        "K": k,
        "B": branches,
        "forks": [chosen.get(i, []) for i in range(len(rewards))],
        "n_new": len(group.rollouts) - len(rewards),
    }


def ehpo(
    trunks,
    n_group=8,
    n_trunk=4,
    base=0.5,
    vocab_size=151936,
    scale=1.0,
    branches=1,
    max_branch_per_trunk=2,
    **given,
) -> Result:
    @dataclass
    class GivenEvents(EHPO):
        """The allocator with the trunks' transitions given."""

        def events(self, r: Rollout, entropy: Sequence[float]) -> list[Event]:
            rows = trunks[r.slot] if r.slot < len(trunks) else []
            return [Event(int(e["pos"]), *tensor([e["h_start"], e["h_end"]]).tolist()) for e in rows]

    own = {
        "easy": (0,),
        "hard": (1,),
        "total_rollouts": n_group,
        "first_wave": n_trunk,
        "base": base,
        "scale": scale,
        "branches": branches,
        "max_forks": max_branch_per_trunk,
        "vocabulary_size": vocab_size,
    }
    part = GivenEvents(**(own | given))
    draws = {("ehpo/branch", "0#0.0", t, i): e["u"] for t, row in enumerate(trunks) for i, e in enumerate(row)}
    longest = 1 + max((int(e["pos"]) for row in trunks for e in row), default=0)
    step = run_step(
        part, 1, lambda r: 0.0, injected=draws, length=longest, max_tokens=longest + 1, forward=_no_entropies
    )
    (group,) = step.groups
    told = group.extras[BRANCHES]
    made = sum(b.count for b in told)
    return {
        "probabilities": [[b.trunk, b.at, b.probability] for b in told],
        "branches": [[b.trunk, b.at, b.count] for b in told if b.count],
        "from_root": len(group.rollouts) - part.first_wave - made,
        "total": len(group.rollouts),
    }


def trace_tree(
    root_value,
    total_budget,
    stage1_budget,
    rollouts=None,
    tree=None,
    root_floor=1,
    root_cap=None,
    anchor_cap=4,
    **given,
) -> Result:
    own = {"min_per_prompt": root_floor, "max_per_prompt": root_cap, "max_branches": anchor_cap}
    part = create("allocator", "trace_tree", **(own | given))
    values = tensor(root_value).tolist()
    counts = part.allocate_roots(values, int(stage1_budget))
    known = [0.5 if math.isnan(v) else min(max(v, 0.0), 1.0) for v in values]
    rows = list(rollouts or ())
    anchors = [
        Anchor(j, t, v) for j, row in enumerate(rows) for t, v in enumerate(tensor(row["prefix_value"]).tolist())
    ]
    left = int(total_budget) - sum(counts)
    continued = part.allocate_anchors(anchors, [float(row["outcome"]) > part.success_threshold for row in rows], left)
    found = backup(tree["children"], {k: float(x) for k, x in tree["leaf_reward"].items()}) if tree else {}
    return {
        "root_alloc": counts,
        "root_left": int(stage1_budget) - sum(counts),
        "root_value": sum(1 - v**m - (1 - v) ** m for v, m in zip(known, counts, strict=True)),
        "anchors": [[a.rollout, a.turn, k] for a, k in zip(anchors, continued, strict=True) if k],
        "prefix_left": left - sum(continued),
        "targets": {node: list(found[node]) for node in (tree or {}).get("nodes", found) if node in found},
    }


FORMS = {form.__name__: form for form in (arpo, resum, elpo, datpo, ehpo, trace_tree)}
