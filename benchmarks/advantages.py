"""Every advantage estimator against verl's and TRL's own GRPO: 8,192 rollouts, groups of 8 and ragged groups.

    python benchmarks/advantages.py

Both hosts' functions and ours get the same rewards; the ratios are of one run. verl's functions get token rewards and
a uid array, as its trainer hands them over, and include the broadcast over the tokens, as ours do. TRL's arithmetic is
that of its generate-and-score step (weighted sum of the rewards, group mean and deviation, [B] advantages); "on
tokens" adds the broadcast to [B,T], which TRL leaves to its loss and all the others include.
"""

from __future__ import annotations

import numpy as np
import torch
from _measure import machine, medians, table

import rlx_plugins as rlx
from rlx_plugins.core.registry import builtin_names

ROWS, TOKENS, SIZE = 8192, 64, 8


def data(ragged: bool) -> tuple[rlx.RolloutBatch, torch.Tensor]:
    """A batch with two reward components, and its group ids."""
    g = torch.Generator().manual_seed(0)
    if ragged:
        sizes = torch.randint(1, 2 * SIZE, (ROWS,), generator=g)
        group = torch.arange(ROWS).repeat_interleave(sizes)[:ROWS]
        group = group[torch.randperm(ROWS, generator=g)]
    else:
        group = torch.arange(ROWS) // SIZE
    components = torch.stack([(torch.rand(ROWS, generator=g) < 0.4).float(), torch.rand(ROWS, generator=g)], 1)
    lengths = torch.randint(1, TOKENS + 1, (ROWS,), generator=g)
    mask = torch.arange(TOKENS) < lengths[:, None]
    columns = {
        "rewards": components.sum(1),
        "reward_components": components,
        "component_names": ("correct", "efficiency"),
        "group": group,
        "response_mask": mask,
        "keep": torch.ones(ROWS, dtype=torch.bool),
        "row_id": torch.arange(ROWS),
    }
    return rlx.RolloutBatch(columns), group


def trl_arithmetic(components: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """What TRL 1.16 computes for `scale_rewards="group"`, with its own helper for the deviation."""
    from trl.trainer.utils import nanstd

    unscorable = components.isnan().all(1)
    rewards = (components * weights).nansum(1)
    rewards[unscorable] = torch.nan
    grouped = rewards.view(-1, SIZE)
    mean = grouped.nanmean(1).repeat_interleave(SIZE, 0)
    std = nanstd(grouped, dim=1).repeat_interleave(SIZE, 0)
    return torch.nan_to_num((rewards - mean) / (std + 1e-4), nan=0.0)


def main() -> None:
    from verl.trainer.ppo import core_algos

    print(f"{machine()}\n")
    for ragged in (False, True):
        batch, group = data(ragged)
        token_rewards = torch.zeros(ROWS, TOKENS)
        token_rewards[:, 0] = batch.rewards
        float_mask = batch.response_mask.float()
        uid = np.array([f"prompt-{i}" for i in group.tolist()], dtype=object)
        candidates = {
            "verl grpo_vectorized": lambda t=token_rewards, m=float_mask, u=uid: (
                core_algos.compute_grpo_vectorized_outcome_advantage(t, m, u)
            ),
            "verl grpo (loop)": lambda t=token_rewards, m=float_mask, u=uid: core_algos.compute_grpo_outcome_advantage(
                t, m, u
            ),
        }
        baselines = ["verl grpo_vectorized"]
        if not ragged:
            weights = torch.ones(2)
            candidates["TRL grpo"] = lambda b=batch, w=weights: trl_arithmetic(b.reward_components, w)
            candidates["TRL grpo on tokens"] = lambda b=batch, w=weights: (
                trl_arithmetic(b.reward_components, w)[:, None] * b.response_mask
            )
            baselines += ["TRL grpo", "TRL grpo on tokens"]
        for name in sorted(builtin_names("advantage")):
            part = rlx.create("advantage", name)
            try:
                part(batch)
            except rlx.RLXError as missing:  # signals or components that this batch does not have
                print(f"left out: {name}, {str(missing).split(';')[0]}")
                continue
            # a fresh batch each time: the group index is part of the work
            candidates[name] = lambda p=part, c=dict(batch): p(rlx.RolloutBatch(c))
        print()
        title = f"{ROWS:,} rollouts of up to {TOKENS} tokens, " + ("ragged groups" if ragged else f"groups of {SIZE}")
        print(table(title, medians(candidates), baselines))


if __name__ == "__main__":
    main()
