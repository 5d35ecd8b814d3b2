"""What reward functions report of a rollout stays with it when a replay brings it back."""

from __future__ import annotations

import torch
from trl_tiny import dataset, digits, run

import rlx_plugins as rlx


def reporting(completions, completion_ids, log_extra, **columns):
    """`digits`, which reports the sum of each completion's token ids."""
    log_extra("told", [float(sum(ids)) for ids in completion_ids])
    return digits(completions)


def test_a_replayed_rollout_keeps_what_was_reported_of_it(model, tmp_path, registered):
    seen = []

    @registered("advantage", "test_told")
    class Told(rlx.Advantage):
        requires = frozenset({"told"})

        def __call__(self, batch):
            seen.append(batch)
            return {"advantages": batch.spread(batch.rewards)}

    plugins = {"method": {"name": "rollout_replay", "drop_degenerate": False}, "advantage": "test_told"}
    run(
        model,
        tmp_path,
        plugins=plugins,
        rollout_signals=["told"],
        reward_funcs=[reporting],
        train_dataset=dataset(2),
        max_steps=3,
    )
    assert seen[-1].staleness.max() > 0, "no group came back: the test sees nothing"
    for batch in seen:
        assert torch.equal(batch.told.long(), (batch.response_ids * batch.response_mask).sum(1))
