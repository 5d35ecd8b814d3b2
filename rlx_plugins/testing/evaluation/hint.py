"""Function forms of the hints: the rollout program on a scripted executor."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from ...core.batch import pack
from ...core.config import Parts
from ...core.context import Context
from ...core.kinds import Allocator
from ...core.params import param
from ...core.preparation import prepare
from ...core.registry import create
from ...core.rollout import drive, rollout_program
from ...core.trajectory import Group, Rollout
from ...hints.adaprefix import AdaPrefix
from ...hints.adhint import HINTED, ADHint
from ...hints.guide import GUIDED
from ...hints.xrpo import SEEDED
from ..scripted import ScriptedExecutor
from .building import tensor

Result = dict[str, Any]


def adaprefix(
    solution_len,
    observations,
    total_steps,
    target=0.5,
    interval=10,
    ema=0.5,
    gain_global=0.25,
    gain_local=0.25,
    f_init=0.5,
    f_max=0.9,
    withdraw_start=0.7,
    withdraw_end=0.9,
    decay=None,
    initial_share=None,
    max_share=None,
) -> Result:
    observed: dict[str, float] = {}

    @dataclass
    class GivenRates(AdaPrefix):
        """The controller with its observations given as rates."""

        def success_rates(self, groups: list[Group]) -> dict[str, float]:
            return observed

    part = GivenRates(
        target=target,
        interval=interval,
        decay=1 - ema if decay is None else decay,
        gain_global=gain_global,
        gain_local=gain_local,
        initial_share=f_init if initial_share is None else initial_share,
        max_share=f_max if max_share is None else max_share,
        withdraw_start=withdraw_start,
        withdraw_end=withdraw_end,
    )
    keys = [str(i) for i in range(len(solution_len))]
    solutions = {key: {"solution": [2] * int(n)} for key, n in zip(keys, solution_len)}
    longest = 2 + max(map(int, solution_len), default=0)
    out: Result = {"fraction": [], "prefix_len": [], "envelope": []}
    for step in range(int(total_steps)):
        given = observations[step] if step < len(observations) else None
        observed = {str(key): r for key, r in (given or {}).items() if r is not None and math.isfinite(r)}
        ctx = Context(
            step,
            int(total_steps),
            len(keys),
            2,
            longest,
            {key: [] for key in keys},
            keys,
            columns=solutions.__getitem__,
        )
        out["fraction"].append([part.share(key, ctx) for key in keys])
        out["envelope"].append(part.envelope(ctx))
        ready = drive(rollout_program(Parts({"hint": [part]}), ctx), ScriptedExecutor(lambda r: 0.0))
        prefix = {g.prompt_key: sum(len(s.tokens) for s in g.rollouts[0].segments if not s.from_model) for g in ready}
        out["prefix_len"].append([prefix[key] for key in keys])
    return out | {
        "level": part.level,
        "offset": [part.offset.get(key, 0.0) for key in keys],
        "success_ema": [part.success.get(key) for key in keys],
    }


@dataclass
class _GivenSizes(Allocator):
    """As many rollouts as rewards are given for the group."""

    kind, name = "allocator", "given_sizes"

    sizes: dict[str, int] = param()

    def more(self, idle: list[Group], ctx: Context) -> list[Rollout]:
        return [r for g in idle if not g.rollouts for r in g.start(self.sizes[g.prompt_key])]


def adhint(naive_rewards, solution_len, noise, w_min=0.1, w_max=0.9, skip_difficulty=0.0, r_max=1.0, **given) -> Result:
    drawn = dict(enumerate(tensor(noise).tolist()))

    @dataclass
    class GivenNoise(ADHint):
        """The hint with its noise given."""

        def noise(self, group: Group, ctx: Context) -> float:
            return drawn[int(group.prompt_key)]

    own = {"min_share": w_min, "max_share": w_max, "skip_difficulty": skip_difficulty, "max_reward": r_max}
    part = GivenNoise(hinted_rollouts=1, **(own | given))
    plain = {str(i): tensor(row).tolist() for i, row in enumerate(naive_rewards)}
    solutions = {key: {"solution": [2] * int(n)} for key, n in zip(plain, solution_len, strict=True)}

    def reward(r: Rollout) -> float:
        return plain[r.prompt_key][r.slot] if r.slot < len(plain[r.prompt_key]) else math.nan

    longest = part.min_continuation + max(map(int, solution_len), default=0)
    ctx = Context(0, 1, len(plain), 2, longest, {key: [] for key in plain}, list(plain), columns=solutions.__getitem__)
    allocator = _GivenSizes({key: max(len(row), 1) for key, row in plain.items()})
    drive(rollout_program(Parts({"allocator": [allocator], "hint": [part]}), ctx), ScriptedExecutor(reward))
    out: Result = {"difficulty": [], "ratio": [], "hint_len": [], "use_hint": []}
    for g in ctx.started:
        hinted = [r for r in g.rollouts if r.tag == HINTED]
        difficulty = part.difficulty(g)
        out["difficulty"].append(difficulty)
        out["ratio"].append(part.share(difficulty, part.noise(g, ctx)) if hinted else 0.0)
        out["hint_len"].append(len(hinted[0].segments[0].tokens) if hinted else 0)
        out["use_hint"].append(bool(hinted))
    return out


def guide(
    rewards,
    group,
    k_guided,
    has_hint,
    success=0.0,
    mode="append",
    guided_rewards=None,
    std=True,
    eps=1e-6,
    success_threshold=None,
) -> Result:
    threshold = success if success_threshold is None else success_threshold
    part = create("hint", "guide", k_guided=k_guided, success_threshold=threshold, mode=mode)
    credit = create("advantage", "grpo", scale="group" if std else "none", eps=eps)
    plain: dict[str, list[float]] = {}
    place: dict[tuple[str, int], int] = {}
    for row, (g, reward) in enumerate(zip(group, tensor(rewards).tolist())):
        place[str(g), len(plain.setdefault(str(g), []))] = row
        plain[str(g)].append(reward)
    hinted = {str(g): tensor(given).tolist() for g, given in (guided_rewards or {}).items() if given is not None}
    keys = sorted(plain, key=float)
    hints = {str(g): {"hint": [2] if has else []} for g, has in has_hint.items()}

    def reward(r: Rollout) -> float | None:
        if r.tag != GUIDED:
            return plain[r.prompt_key][r.slot]
        at = r.slot - len(plain[r.prompt_key])
        given = hinted.get(r.prompt_key, [])
        return given[at] if at < len(given) else None

    ctx = Context(
        0, 1, len(keys), 1, 1, {key: [] for key in keys}, keys, columns=lambda key: hints.get(key, {"hint": []})
    )
    allocator = _GivenSizes({key: len(given) for key, given in plain.items()})
    ready = drive(rollout_program(Parts({"allocator": [allocator], "hint": [part]}), ctx), ScriptedExecutor(reward))
    triggered = [g for g in ctx.started if any(r.tag == GUIDED for r in g.rollouts)]
    unguided, guided = torch.zeros(len(rewards), dtype=torch.float64), {g.prompt_key: [] for g in triggered}
    for rollout, advantage in _advantages(credit, ready):
        if rollout.tag == GUIDED:
            guided[rollout.prompt_key].append(advantage)
        else:
            unguided[place[rollout.prompt_key, rollout.slot]] = advantage
    return {
        "need_guidance": [int(g.prompt_key) for g in triggered],
        "extra_rollouts": sum(r.tag == GUIDED for g in triggered for r in g.rollouts),
        "adv_unguided": unguided,
        "adv_guided": {key: row for key, row in guided.items() if row},
    }


def _advantages(credit: Any, groups: list[Group]) -> list[tuple[Rollout, float]]:
    """The advantage of every row that is trained on, through the batch phase."""
    batch = pack(groups, dtype=torch.float64)
    if bool(torch.isnan(batch.rewards).all()):
        return []
    parts = Parts({"advantage": [credit], "aggregate": [create("aggregate", "token_mean")]})
    out = prepare(parts, batch).batch
    return list(zip(out.rollout, out.advantages[:, 0].tolist()))


def xrpo(
    rewards,
    group,
    prompt_embedding,
    corpus_prompt,
    corpus_embedding,
    corpus_tokens,
    k=2,
    min_sim=-1.0,
    max_example_tokens=1024,
    budget_tokens=2048,
    **given,
) -> Result:
    own = {
        "examples": k,
        "min_similarity": min_sim,
        "max_example_tokens": max_example_tokens,
        "budget_tokens": budget_tokens,
        "extra": 1,
    }
    part = create("hint", "xrpo", **(own | given))
    part.corpus = [
        {"prompt_key": str(p), "embedding": tensor(e), "question": [], "answer": [2] * int(n)}
        for p, e, n in zip(corpus_prompt, corpus_embedding, corpus_tokens, strict=True)
    ]
    plain: dict[str, list[float]] = {}
    for g, reward in zip(group, tensor(rewards).tolist(), strict=True):
        plain.setdefault(str(g), []).append(reward)

    def reward_of(r: Rollout) -> float:
        return plain[r.prompt_key][r.slot] if r.slot < len(plain[r.prompt_key]) else math.nan

    def columns(key: str) -> dict[str, Any]:
        return {"embedding": tensor(prompt_embedding[int(key)])}

    ctx = Context(0, 1, len(plain), 1, 1, {key: [] for key in plain}, list(plain), columns=columns)
    parts = Parts({"allocator": [_GivenSizes({key: len(row) for key, row in plain.items()})], "hint": [part]})
    before = list(part.corpus)
    drive(rollout_program(parts, ctx), ScriptedExecutor(reward_of))
    part.corpus = before
    plan: Result = {}
    for g in ctx.started:
        if not part.failed(g):
            continue
        examples = part.chosen(g)
        tokens = sum(e.tokens for e in examples)
        assert [len(r.prompt) for r in g.rollouts if r.tag == SEEDED] == [tokens] * bool(examples)
        mode = "seeded" if examples else "zero_shot"
        plan[g.prompt_key] = {"examples": [list(e) for e in examples], "tokens": tokens, "mode": mode}
    return {"plan": plan}


FORMS = {"adaprefix": adaprefix, "adhint": adhint, "guide": guide, "xrpo": xrpo}
