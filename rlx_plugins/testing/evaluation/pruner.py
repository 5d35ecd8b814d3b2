"""Function forms of the pruners: procedures, run through the rollout program."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...core.config import Parts
from ...core.context import Context
from ...core.kinds import Allocator
from ...core.operations import Abort, Forward, Operation
from ...core.params import param
from ...core.rollout import drive, rollout_program
from ...core.trajectory import Group, Rollout, Segment
from ...hosts.table import TableHost
from ...pruning.april import April
from ...pruning.arrol import Arrol, Choice
from ...sampling.in_order import InOrder
from .building import tensor

Result = dict[str, Any]


@dataclass
class _Sizes(Allocator):
    """As many rollouts as are given for the prompt."""

    kind, name = "allocator", "given_sizes"

    sizes: Mapping[str, int] = param(factory=dict)

    def more(self, idle: list[Group], ctx: Context) -> list[Rollout]:
        return [r for g in idle if not g.rollouts for r in g.start(self.sizes[g.prompt_key])]


@dataclass
class _ScoredArrol(Arrol):
    """ARRoL whose hidden state is the score itself; keeps its choices by group."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.choices: list[Choice] = []

    def _scores(self, hidden: Sequence[Any], ctx: Context) -> list[float]:
        return [float(h[0]) for h in hidden]

    def _train(self, scored: Sequence[Any], ctx: Context) -> None:
        """There is no head to train."""

    def choose(self, *arguments: Any, **named: Any) -> Choice:
        self.choices.append(super().choose(*arguments, **named))
        return self.choices[-1]


def arrol(
    score,
    group,
    finished,
    reward,
    uniform,
    kappa=0.5,
    rho=0.5,
    min_keep=2,
    bins=10,
    n_pos=None,
    n_neg=None,
    decay=0.9,
    success_threshold=0.5,
) -> Result:
    score, reward = tensor(score).tolist(), tensor(reward).tolist()
    ids = sorted(set(tensor(group, torch.int64).tolist()))
    rows = {f"g{n}": [i for i, g in enumerate(tensor(group, torch.int64).tolist()) if g == n] for n in ids}
    part = _ScoredArrol(1, kappa, rho, min_keep, bins, decay, warmup=0, success_threshold=success_threshold)
    part.positive = [0.0] * bins if n_pos is None else tensor(n_pos).tolist()
    part.negative = [0.0] * bins if n_neg is None else tensor(n_neg).tolist()
    draws = dict(zip(rows, tensor(uniform).tolist()))
    ctx = Context(0, 1, len(rows), 1, 2, {key: [0] for key in rows}, offered=list(rows))
    ctx.injected = {("arrol/keep", f"{key}#0.{n}", 0): draws[key] for n, key in enumerate(rows)}

    def execute(operation: Operation) -> Any:
        if isinstance(operation, Forward):
            return [tensor([score[rows[r.prompt_key][r.slot]]]) for r in operation.rollouts]
        assert not isinstance(operation, Abort)
        for r in operation.rollouts:
            i = rows[r.prompt_key][r.slot]
            if r.pause_at is not None and not finished[i]:
                r.segments, r.state = [Segment([0])], "paused"
            else:
                r.finish("eos")
                r.reward = reward[i]

    sizes = _Sizes({key: len(members) for key, members in rows.items()})
    drive(rollout_program(Parts({"allocator": [sizes], "pruner": [part]}), ctx), execute)

    p_hat, keep_prob, keep = list(reward), [1.0] * len(reward), [True] * len(reward)
    groups, choices = [], iter(part.choices)
    for key, members in rows.items():
        running = [i for i in members if not finished[i]]
        done = [i for i in members if finished[i]]
        correct = sum(reward[i] > success_threshold for i in done)
        choice = next(choices) if running else Arrol.choose(part, [], len(members), len(done), correct, draws[key])
        for i, p, s, k in zip(running, choice.p_hat, choice.keep_prob, choice.keep):
            p_hat[i], keep_prob[i], keep[i] = p, s, k
        groups.append(
            {"K": choice.kept_total, "running_slots": choice.running_slots, "rho_running": choice.rho_running}
        )
    return {
        "p_hat": tensor(p_hat),
        "keep_prob": tensor(keep_prob),
        "keep": keep,
        "groups": groups,
        "n_pos": tensor(part.positive),
        "n_neg": tensor(part.negative),
    }


def april(lengths, rollout_groups=2, over_sampling=4, steps=3, max_tokens=64, recycle=True, max_age=None) -> Result:
    lengths = [[int(n) for n in tensor(row).tolist()] for row in lengths]
    host = TableHost(len(lengths), resolution=0.0, lengths=lambda r: lengths[host.row[r.prompt_key]][r.slot])
    part, stream = April(over_sampling / rollout_groups, recycle, max_age), InOrder(repeat=False)
    sizes = _Sizes({key: len(lengths[i]) for key, i in host.row.items()})
    parts = Parts({"sampler": [stream], "allocator": [sizes], "pruner": [part]})
    report = []
    for step in range(steps):
        host.engine.load(host.policy.theta, version=step)
        ctx = Context(step, steps, rollout_groups, 1, max_tokens, host.prompts, version=step)
        ticks = host.engine.ticks
        returned = drive(rollout_program(parts, ctx), host.execute)
        done = [(host.row[g.prompt_key], r) for g in returned for r in g.done()]
        tokens = sum(len(r) for _, r in done)
        stale = sum(len(s.tokens) for _, r in done for s in r.segments if s.version < step)
        report.append(
            {
                "returned": sorted(host.row[g.prompt_key] for g in returned),
                "ticks": host.engine.ticks - ticks,
                "tokens": tokens,
                "off_policy_tokens": stale,
                "off_policy_fraction": stale / tokens if tokens else 0.0,
                "wasted": int(ctx.metrics["pruner/april_wasted_tokens"]),
                "buffer": [_parked(host, g) for g in part.parked],
                "surplus": [host.row[g["prompt_key"]] for g in part.surplus],
                "truncated": sorted([i, r.slot] for i, r in done if r.stop == "length"),
                "max_policies_per_member": max((len({s.version for s in r.segments}) for _, r in done), default=0),
            }
        )
    return {"steps": report, "groups_consumed": stream.taken}


def _parked(host: TableHost, group: Mapping[str, Any]) -> list[Any]:
    """[prompt, tokens so far of each member, step in which it was started]."""
    lengths = [sum(len(s["tokens"]) for s in r["segments"]) for r in group["rollouts"]]
    return [host.row[group["prompt_key"]], lengths, group["extras"]["april_born"]]


FORMS = {"arrol": arrol, "april": april}
