"""Every advantage estimator against GRPO, ours and the hosts', on one batch of ragged groups.

    python benchmarks/advantages.py [--rows 1024] [--tokens 2048]

All get the same batch, and a fresh one each time: the group index and the lengths are part of the work. verl's
functions get token rewards and a uid array, as its trainer hands them over. TRL's arithmetic is that of its
generate-and-score step; it knows groups of one size only, so that here the same rewards stand in groups of 8, and it
ends at one number per row: "on tokens" adds the broadcast to [B,T] that all the others include. For the scale of it all
the loss of PPO and its gradient on the same rows are measured too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from _batch import build, config, scored_batch, sizes
from _measure import against, machine, table
from objective import loss_and_gradient, moved

import rlx_plugins as rlx
from rlx_plugins.core.registry import builtin_names

SIZE = 8
"""Rollouts of a group in TRL's arithmetic."""
VERL, TRL = "verl grpo_vectorized", "TRL grpo on tokens"

REASONS = {
    "verl grpo": "loops over the rows",
    "loss and gradient": "of the same rows with PPO, for comparison",
    "lead": "group statistics of two components, twice; whitens over the tokens",
    "erils": "sorts the group's external rows out, and returns the mask without them",
    "reinforce_pp": "returns the return of every token beside its advantage",
    "xrpo": "reads the log-probability of every token and changes the advantages token by token",
    "sd_grpo": "finds the role of every token, then its advantage",
    "a2tgpo": "looks up advantage and gain of every token's turn",
    "rtmc": "compares states and actions, which are token sequences, in Python; looks up every token's step",
    "iapo": "grpo; counts the tokens of every turn and looks up every token's weight",
    "echo": "grpo; normalises entropy and confidence over all tokens, to a score for each",
    "elpo": "builds the tree of the forks; finds every token's node",
    "arpo": "builds the tree of the forks; finds every token's node and how many rows share it",
    "datpo": "the tree, embeddings of its blocks, every token's block and which of its copies is the first",
    "sao": "two discounted sums along every row, for the actor and the critic, with tool output taken out and put back",
    "hapo": "selects a quantile of the entropies of all tokens, for a score for each",
}


def host_functions(batch: rlx.RolloutBatch) -> dict[str, Callable[[], Any]]:
    """The hosts' own GRPO on the batch's rewards."""
    from verl.trainer.ppo import core_algos

    mask, token_rewards = batch.response_mask.float(), torch.zeros(batch.response_mask.shape)
    token_rewards[:, 0] = batch.rewards
    uid = np.array([f"prompt-{i}" for i in batch.group.tolist()], dtype=object)
    whole = batch.size - batch.size % SIZE
    components, weights = batch.reward_components[:whole], torch.ones(batch.reward_components.shape[1])
    return {
        VERL: lambda: core_algos.compute_grpo_vectorized_outcome_advantage(token_rewards, mask, uid),
        "verl grpo": lambda: core_algos.compute_grpo_outcome_advantage(token_rewards, mask, uid),
        "TRL grpo on rows": lambda: trl_arithmetic(components, weights),
        TRL: lambda: trl_arithmetic(components, weights)[:, None] * mask[:whole],
    }


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


def estimator(name: str, batch: rlx.RolloutBatch) -> Callable[[], Any]:
    """One call of the estimator on a fresh copy of the batch, shaped by the rewards it needs."""
    parts = build(config("advantage", name), batch)
    for reward in parts["reward"]:
        batch = batch.with_columns(**reward(batch))
    part, columns = parts.one("advantage"), dict(batch)
    run = {"step": batch.step, "total_steps": batch.total_steps, "seed": batch.seed}

    @torch.no_grad()
    def call() -> None:
        part(rlx.RolloutBatch(columns, **run))

    return call


def estimators(batch: rlx.RolloutBatch) -> dict[str, Callable[[], Any]]:
    """Every built-in estimator by name."""
    return {name: estimator(name, batch) for name in sorted(builtin_names("advantage"))}


def main() -> None:
    given = sizes(rows=1024, tokens=2048)
    print(f"{machine()}\n")
    batch = scored_batch(given.rows, given.tokens)
    candidates = host_functions(batch) | estimators(batch)
    candidates["loss and gradient"] = loss_and_gradient({"clip": "ppo"}, batch, moved(batch))
    title = f"{batch.size:,} rollouts of up to {given.tokens:,} tokens in {len(batch.groups)} groups"
    print(table(title, "grpo", against(candidates["grpo"], candidates), [VERL, TRL], REASONS))


if __name__ == "__main__":
    main()
