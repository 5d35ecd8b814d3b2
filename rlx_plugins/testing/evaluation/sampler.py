"""Function forms of the samplers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ...core.context import Context
from ...core.trajectory import Group, Rollout
from ...sampling.vade import Vade, utility
from .building import tensor

Result = dict[str, Any]


def vade(
    alpha,
    beta,
    batch_size,
    theta=None,
    seed=None,
    visited=None,
    rewards=None,
    decay_sample=0.8,
    decay_global=0.995,
    exclude=None,
) -> Result:
    keys = [str(i) for i in range(len(alpha))]
    ctx = Context(0, 1, int(batch_size), 1, 1, {key: [] for key in keys})
    if seed is not None:
        ctx.injected[("vade/theta",)] = int(seed) / 2**53
    given = None if theta is None else tensor(theta).clamp(0, 1)

    @dataclass
    class Seen(Vade):
        """The sampler, with its draw given or looked at."""

        def plausible(self, ctx: Context) -> torch.Tensor:
            self.drawn = super().plausible(ctx) if given is None else given
            return self.drawn

    part = Seen(decay_sample=decay_sample, decay_global=decay_global)
    part.load_state_dict({"keys": keys, "successes": tensor(alpha), "failures": tensor(beta)})
    ctx.started = [Group(f"started{i}", str(i), []) for i in exclude or []]
    selected = part.draw(int(batch_size), ctx)
    if visited is not None:
        groups = [_finished(f"{i}#{n}", str(i), row) for n, (i, row) in enumerate(zip(visited, rewards or []))]
        part.observe(groups, ctx)
    return {
        "alpha": part.successes,
        "beta": part.failures,
        "mean": part.mean(),
        "selected": [int(key) for key in selected],
        "utility": utility(part.drawn),
    }


def _finished(name: str, key: str, rewards: Any) -> Group:
    """A group whose rollouts have ended with these rewards."""
    group = Group(name, key, [])
    for slot, reward in enumerate(tensor(rewards).tolist()):
        group.rollouts.append(Rollout(key, name, slot, [], state="finished", stop="eos", reward=reward))
    return group


FORMS = {"vade": vade}
