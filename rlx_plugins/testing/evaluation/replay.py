"""Function forms of the replay methods."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...core.context import Context
from ...core.registry import create
from ...core.trajectory import Group, Rollout, Segment
from ...replay.rollout_replay import RolloutReplay
from .building import per_row, reward_batch, run_loss, tensor

Result = dict[str, Any]


def rollout_replay(op, **arguments) -> Result:
    return {"step": _step, "loss": _loss}[op](**arguments)


def _step(
    buffer,
    fresh,
    perm,
    batch_groups,
    sigma=0.5,
    capacity=512,
    first=False,
    drop_degenerate=True,
    fresh_share=None,
) -> Result:
    @dataclass
    class GivenOrder(RolloutReplay):
        """The replay with its permutation given."""

        def permutation(self, n: int, ctx: Context) -> list[int]:
            return [int(i) for i in perm if 0 <= int(i) < n]

    names = {str(p): p for p, _ in [*buffer, *fresh]}
    ctx = Context(1, 2, int(batch_groups), 1, 1, {key: [] for key in names})
    share = sigma if fresh_share is None else fresh_share
    part = GivenOrder(fresh_share=share, capacity=int(capacity), drop_degenerate=drop_degenerate)
    part.buffer = [_scored(f"old{i}", str(p), mean).to_plain() for i, (p, mean) in enumerate(buffer)]
    part.rolled_out = 0 if first else len(names)
    replayed, to_start = part.intake(int(batch_groups), ctx)
    part.observe([_scored(f"new{i}", str(p), mean) for i, (p, mean) in enumerate(fresh)], ctx)
    return {
        "replay_ids": [names[g.prompt_key] for g in replayed],
        "buffer_ids": [names[g["prompt_key"]] for g in part.buffer],
        "short": int(batch_groups) - to_start - len(replayed),
    }


def _scored(name: str, key: str, mean: float) -> Group:
    """A finished group with this mean reward."""
    token = Segment([1], logp=[-1.0], version=0)
    row = Rollout(key, name, 0, [], segments=[token], state="finished", stop="eos", reward=mean)
    return Group(name, key, [], rollouts=[row])


def _loss(
    rewards,
    group,
    response_mask,
    logp_new,
    logp_behaviour=None,
    logp_prox=None,
    clip=0.2,
    logp_rollout=None,
    logp_old=None,
    eps_low=None,
    eps_high=None,
) -> Result:
    advantages = per_row(create("advantage", "grpo", eps=1e-6)(reward_batch(rewards, group))["advantages"], None)
    own = {"eps_low": clip if eps_low is None else eps_low, "eps_high": clip if eps_high is None else eps_high}
    out = run_loss(
        {"clip": create("clip", "rollout_replay", **own)},
        logp_new=logp_new,
        response_mask=response_mask,
        advantages=advantages,
        logp_rollout=tensor(logp_rollout if logp_behaviour is None else logp_behaviour),
        logp_old=tensor(logp_old if logp_prox is None else logp_prox),
    )
    del out["ratio"]  # that of the unused ratio part
    return {
        **out,
        "advantages": advantages,
        "token_loss": out["per_token_loss"],
        "clip_frac": out["clipped"],
    }


def cadence(
    group, answers, correct, seq_mean_logp, min_consistency=0.6, min_samples=4, max_per_prompt=2, **given
) -> Result:
    bound = None if max_per_prompt is None or max_per_prompt == math.inf else int(max_per_prompt)
    own = {"min_consistency": min_consistency, "min_samples": min_samples, "max_per_prompt": bound}
    part = create("replay", "cadence", **(own | given))
    mean_logp = tensor(seq_mean_logp)
    verdicts = part.vote(group, answers, [bool(c) for c in tensor(correct)], mean_logp.tolist())
    selected = [i for v in verdicts.values() for i in v.rows]
    return {
        "selected": selected,
        "prompts": {g: {"share": v.share, "accepted": v.accepted} for g, v in verdicts.items()},
        "loss": _fine_tuning_loss(mean_logp[selected]) if selected else 0.0,
    }


def _fine_tuning_loss(mean_logp: Tensor) -> Tensor:
    """The loss of kept rows, one token each, as the update makes it of their column and advantage."""
    rows = reward_batch(
        torch.ones_like(mean_logp), list(range(len(mean_logp))), self_distilled=torch.ones_like(mean_logp)
    )
    advantages = create("advantage", "cadence")(rows)["advantages"]
    out = run_loss(
        {"clip": create("clip", "gpg")},
        logp_new=mean_logp[:, None],
        response_mask=torch.ones(len(mean_logp), 1),
        advantages=advantages,
        agg="seq_mean_token_mean",
        logp_old=mean_logp[:, None],
    )
    return out["loss"]


FORMS = {"rollout_replay": rollout_replay, "cadence": cadence}
