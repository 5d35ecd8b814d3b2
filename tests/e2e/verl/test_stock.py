"""verl itself, without plug-ins, on the CPU: what every other run here builds on."""

from __future__ import annotations

import pytest

REPEATED = ["critic/score/mean", "response_length/mean", "actor/pg_loss", "actor/grad_norm", "actor/entropy"]


def test_grpo_learns(verl_run):
    run = verl_run(steps=15)
    score = run.column("critic/score/mean")
    assert sum(score[-4:]) / 4 > sum(score[:4]) / 4 + 0.1


@pytest.mark.parametrize("replica", ["hf", "vllm"])
def test_the_server_has_the_weights_of_each_step(verl_run, replica):
    run = verl_run(replica=replica, steps=3, rollouts=4, learning_rate=1e-3)
    assert sorted(run.steps) == [1, 2, 3]
    assert max(run.column("training/rollout_probs_diff_max")) < 1e-4
    assert min(run.column("actor/grad_norm")) > 0


def test_a_run_killed_and_resumed_goes_on_as_it_did(verl_run, tmp_path):
    settings = {"steps": 4, "rollouts": 4, "folder": tmp_path, "save_every": 2}
    killed = verl_run(**settings, kill_after=3)
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "2"
    resumed = verl_run(**settings)
    assert sorted(resumed.steps) == [3, 4]
    for metric in REPEATED:
        assert resumed.steps[3][metric] == pytest.approx(killed.steps[3][metric], abs=1e-4), metric
