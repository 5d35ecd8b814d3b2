"""Function forms of what selects steps, rollouts, candidates or turns for the update."""

from __future__ import annotations

from typing import Any

import torch

from ...allocation.sol_subset import inversions
from ...core.context import Context
from ...core.registry import create
from ...core.segments import Segments
from ...core.terms import masked
from ...core.trajectory import Group
from ...selectors.bandit_sched import choose
from ...selectors.divopd import Turn, TurnQueue
from .building import reward_batch, tensor

Result = dict[str, Any]


def dart(
    entropy,
    turn_ids,
    group,
    response_mask,
    logp_old=None,
    logp_rollout=None,
    drop_quantile=0.2,
    cap=1.0,
    scope="group",
    pool=None,
) -> Result:
    known = logp_old is not None and logp_rollout is not None
    columns = {"logp_old": tensor(logp_old), "logp_rollout": tensor(logp_rollout)} if known else {}
    batch = reward_batch(group=group, response_mask=response_mask).with_columns(
        entropy=tensor(entropy), turn_ids=tensor(turn_ids, torch.int64), **columns
    )
    part = create("selector", "dart", drop_quantile=drop_quantile, cap=cap if known else None, pool=pool or scope)
    found = part.undecided(batch)
    return {
        "keep": found.keep.long(),
        "step_entropy": found.step_entropy,
        "threshold": found.threshold,
        "weights": part(batch)["weight"],
    }


def bandit_sched(
    x,
    W1,
    b1,
    W2,
    b2,
    budget,
    u_explore,
    u_rank,
    eps=0.1,
    v_prev=0.0,
    v_next=0.0,
    ent_prev=0.0,
    ent_next=0.0,
    ent_threshold=1.0,
    ent_coef=0.1,
    lr=0.01,
) -> Result:
    """`v_prev` of None: the first step, no update."""
    features = tensor(x).reshape(-1, 10)
    features = masked(features, ~torch.isnan(features))
    part = create(
        "selector",
        "bandit_sched",
        budget=budget,
        explore=eps,
        entropy_threshold=ent_threshold,
        entropy_coef=ent_coef,
        learning_rate=lr,
    )
    part.network = {"W1": tensor(W1), "b1": tensor(b1), "W2": tensor(W2), "b2": tensor(b2).reshape(())}
    n = len(features)
    scores = part.scores(features)
    explore = [torch.full((n,), u < eps) for u in list(u_explore)[: min(budget, n)]]
    order = choose(scores, Segments(torch.zeros(n, dtype=torch.int64)), torch.ones(n).bool(), explore, tensor(u_rank))
    selected = torch.argsort(torch.where(order >= 0, order, n), stable=True)[: int((order >= 0).sum())]
    reward, loss = 0.0, 0.0
    if v_prev is not None:
        reward = part.reward((v_prev, ent_prev), (v_next, ent_next))
        loss = part.learn(features[selected], reward)
    return {"scores": scores, "selected": selected, "reward": reward, "loss": loss, **part.network}


def sol_subset(proxy_rewards, group, k_top=12, k_bottom=12, true_rewards=None) -> Result:
    part = create("allocator", "sol_subset", k_top=k_top, k_bottom=k_bottom)
    proxy = tensor(proxy_rewards).tolist()
    true = None if true_rewards is None else tensor(true_rewards).tolist()
    selected: dict[str, Any] = {}
    diag: dict[str, Any] = {}
    members: dict[Any, list[int]] = {}
    for i, g in enumerate(tensor(group, torch.int64).tolist()):
        members.setdefault(g, []).append(i)
    for g, rows in members.items():
        made = Group(str(g), str(g), [0])
        for r, i in zip(made.start(len(rows)), rows, strict=True):
            r.finish("eos")
            r.reward = proxy[i]
        top, bottom = ([rows[i] for i in side] for side in part.split([proxy[i] for i in rows]))
        ctx = Context(0, 1, groups=1, group_size=len(rows), max_tokens=1, prompts={})
        part.complete(made, ctx)
        assert sorted([*top, *bottom]) == [rows[r.slot] for r in made.rollouts]
        selected[str(g)] = {"top": top, "bottom": bottom}
        diag[str(g)] = {
            "selected_std": ctx.metrics["allocator/sol_subset_chosen_std"],
            "pool_std": ctx.metrics["allocator/sol_subset_pool_std"],
            "inversions": None if true is None else inversions([true[i] for i in top], [true[i] for i in bottom]),
        }
    return {"selected": selected, "diag": diag}


def divopd(arrivals, batch_size=64, pool_mult=4, cap=4, max_staleness=2, max_pending_age=8, focus=True) -> Result:
    queue = TurnQueue(batch_size, pool_mult, cap, max_staleness, max_pending_age, focus)
    updates = []
    for turns in arrivals:
        queue.add([_turn(u) for u in turns])
        found = queue.update()
        updates.append(
            {
                "selected": [[u.rid, u.t] for u in found.selected],
                "pending": sorted([u.rid, u.t] for u in found.pending),
                "dead": found.dead,
                "stale_fresh": found.stale_fresh,
                "distinct_rollouts": found.distinct_rollouts,
            }
        )
    return {"updates": updates}


def _turn(u: dict[str, Any]) -> Turn:
    """A turn of the queue from its tokens' log-probs."""
    valid = tensor(u["valid"]).bool()
    gap = masked(tensor(u["logp_gen"]) - tensor(u["logp_teacher"]), valid)
    return Turn(u["rid"], u["t"], u["version"], float(gap.sum()), bool(u["complete"]) and bool(valid.any()))


FORMS = {"dart": dart, "bandit_sched": bandit_sched, "sol_subset": sol_subset, "divopd": divopd}
