"""Function forms of the allocators that plan a step before it is generated, from what earlier steps brought."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ...allocation.coba import beta_density
from ...core.context import Context
from ...core.registry import create
from ...core.terms import masked
from ...core.trajectory import Group, Rollout
from .allocator_rounds import run_step
from .building import tensor

Result = dict[str, Any]


def coba(
    pass_rates,
    failure_history,
    total_budget,
    b_low=2,
    b_up=128,
    kappa=11.0,
    alpha_min=1.0,
    alpha_max=10.0,
    lam=9.0,
    gamma=10.0,
    tau=4.0,
    window=10,
    **given,
) -> Result:
    own = {
        "total_rollouts": int(total_budget) or None,
        "min_per_prompt": b_low,
        "max_per_prompt": b_up,
        "concentration": kappa,
        "alpha_min": alpha_min,
        "alpha_max": alpha_max,
        "failure_weight": lam,
        "sharpness": gamma,
        "saturation": tau,
        "window": window,
    }
    part = create("allocator", "coba", **(own | given))
    rates = [part.unseen if math.isnan(p) else p for p in tensor(pass_rates).tolist()]
    if not rates:
        return {"density": [], "allocation": [], "unspent": int(total_budget), "objective": 0.0}
    part.pass_rates = {str(i): p for i, p in enumerate(rates)}
    part.failures = tensor(failure_history).tolist()
    step = run_step(part, len(rates), lambda r: math.nan)
    counts = [len(g.rollouts) for g in step.groups]
    found = part.capability(rates, step.ctx.step)
    return {
        **found._asdict(),
        "density": [beta_density(p, found.alpha, found.beta) for p in rates],
        "allocation": counts,
        "unspent": int(total_budget) - sum(counts),
        "objective": sum(part.value(p, n, found) for p, n in zip(rates, counts, strict=True)),
    }


def e3(
    epochs, n=8, n_low=4, n_high=12, n_update=2, mode="strict", dataset_size=None, initial_rank=None, **given
) -> Result:
    own = {"per_prompt": n, "lowest": n_low, "highest": n_high, "update": n_update, "mode": mode}
    part = create("allocator", "e3", **(own | given))
    named = [int(i) for epoch in epochs for batch in epoch for i in batch["index"]]
    size = dataset_size if dataset_size is not None else 1 + max(named, default=-1)
    keys = [str(i) for i in range(size)]
    ranks = tensor(initial_rank).tolist() if initial_rank is not None else []
    part.rank = {str(i): max(q, 0.0) for i, q in enumerate(ranks)}
    log = []
    for epoch in epochs:
        for batch in epoch:
            counts, unspent = part.counts([part.rank.get(str(int(i)), 0.0) for i in batch["index"]], n)
            low, high = part.bounds(n)
            log.append({"counts": counts, "unspent": unspent, "n_min": low, "n_max": high})
            means = tensor(batch["mean_reward"]).tolist()
            part.observe([_scored(str(int(i)), m, c) for i, m, c in zip(batch["index"], means, counts)], _context(keys))
        part.turn_epoch(keys)
    low, high = part.bounds(n)
    return {"log": log, "rank": [part.rank.get(key, 0.0) for key in keys], "n_min": low, "n_max": high}


def _context(keys: list[str]) -> Context:
    return Context(0, 1, 1, 1, 1, {key: [] for key in keys})


def _scored(key: str, mean: float, n: int) -> Group:
    """A group of n finished rollouts with this reward each."""
    group = Group(key, key, [])
    for r in group.start(n):
        r.finish("eos")
        r.reward = mean
    return group


def dart(
    success_history,
    success_lengths,
    group_rewards,
    pool,
    n_max=8,
    n_min=1,
    sr_threshold=0.6,
    window=None,
    len_default=50,
    len_min=1,
    success_reward=1.0,
    **given,
) -> Result:
    own = {
        "max_per_prompt": n_max,
        "min_per_prompt": n_min,
        "rate_threshold": sr_threshold,
        "window": window,
        "default_tokens": len_default,
        "least_tokens": len_min,
        "success_reward": success_reward,
    }
    part = create("allocator", "dart", **(own | given))
    tasks = range(len(success_history))
    past = [[int(won) for won in row] for row in success_history]
    part.history = {str(i): row if part.window is None else row[-part.window :] for i, row in enumerate(past)}
    part.longest = {str(i): max(map(int, row)) for i, row in enumerate(success_lengths) if row}
    stored = Rollout("", "", 0, [], state="finished", reward=part.success_reward).to_plain()
    part.pool = {str(i): [stored] * int(n) for i, n in enumerate(pool)}
    rates = [part.rate(str(i)) for i in tasks]
    step = run_step(part, len(tasks), lambda r: 0.0, max_tokens=2**31)
    injected = []
    for i in tasks:
        group = Group(str(i), str(i), [])
        for r, reward in zip(group.start(len(group_rewards[i])), tensor(group_rewards[i]).tolist()):
            r.finish("eos")
            r.reward = reward
        before = len(group.rollouts)
        part.complete(group, step.ctx)
        injected.append(len(group.rollouts) - before)
    return {
        "success_rate": rates,
        "num_rollouts": [len(g.rollouts) for g in step.groups],
        "max_steps": [g.rollouts[0].max_tokens for g in step.groups],
        "inject_from_pool": injected,
    }


def hbpo(n_prompts, group_size, budgets=(512, 1024, 2048, 2560), start=0, **given) -> Result:
    prefixes = [[i] for i in range(len(budgets))]
    part = create("allocator", "hbpo", **({"budgets": list(budgets), "prefixes": prefixes} | given))
    part.prompts = start
    step = run_step(part, int(n_prompts), lambda r: 0.0, group_size=int(group_size), max_tokens=2)
    rows = [[r.extras for r in g.rollouts] for g in step.groups]
    return {
        "budget": [[r["budget"] for r in row] for row in rows],
        "subgroup": [[r["subgroup"] for r in row] for row in rows],
        "texts_needed": [len({tuple(r.segments[0].tokens) for r in g.rollouts}) for g in step.groups],
    }


def eepo(op, **arguments) -> Result:
    return {"gate": _gate, "unlearn": _unlearn}[op](**arguments)


def _gate(entropy_history, group_size, window=3, threshold=0.3, **given) -> Result:
    part = create("allocator", "eepo", **({"window": window, "threshold": threshold} | given))
    history = tensor(entropy_history).tolist()
    first = int(group_size) // 2
    return {
        "avg": part.average(history),
        "active": part.active(history),
        "n_first": first,
        "n_second": int(group_size) - first,
    }


def _unlearn(logits, tokens, response_mask, lr=3e-3, eps=1e-6, loss="complementary", active=True, **given) -> Result:
    part = create("allocator", "eepo", **({"learning_rate": lr, "eps": eps, "loss": loss} | given))
    before = tensor(logits).requires_grad_()
    ids, mask = tensor(tokens, torch.int64)[..., None], tensor(response_mask).bool()

    def logp(x: Tensor) -> Tensor:
        return x.log_softmax(-1).gather(-1, ids)[..., 0]

    value = part.unlearning_loss(logp(before), mask)
    (grad,) = torch.autograd.grad(value, before)
    after = before.detach() - (part.learning_rate * grad if active else 0.0)
    return {
        "loss": value.detach(),
        "grad": grad,
        "logits_after": after,
        "logp_before": masked(logp(before.detach()), mask),
        "logp_after": masked(logp(after), mask),
    }


FORMS = {form.__name__: form for form in (coba, e3, dart, hbpo, eepo)}
