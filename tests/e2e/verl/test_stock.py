"""verl itself, without plug-ins, on the CPU: what every other run here builds on."""

from __future__ import annotations

import pytest

REPEATED = ["critic/score/mean", "response_length/mean", "actor/pg_loss", "actor/grad_norm", "actor/entropy"]


def test_grpo_learns(verl_run):
    run = verl_run("trainer.test_freq=15", "data.val_max_samples=100", steps=15)
    score = run.column("critic/score/mean")
    assert sum(score[-4:]) / 4 > sum(score[:4]) / 4 + 0.1
    assert run.steps[15]["val-core/rlx_tiny/reward/mean@1"] > sum(score[:4]) / 4 + 0.1
    assert_same_weights(run)


def test_vllm_generates(verl_run):
    assert_same_weights(verl_run(replica="vllm", steps=3, rollouts=4, learning_rate=1e-3))


def test_two_training_processes_with_a_reference_policy_and_a_teacher(verl_run, verl_inputs):
    """Both are the model that training starts from: nothing to distill before the first update."""
    extra = ["actor_rollout_ref.actor.use_kl_loss=true"]
    run = verl_run(*extra, steps=2, rollouts=4, ranks=2, learning_rate=1e-3, teacher=verl_inputs["model"])
    assert_same_weights(run)
    for metric in ("actor/kl_loss", "actor/distillation/abs_loss"):
        first, second = run.column(metric)
        assert first == pytest.approx(0, abs=1e-6) and second > 1e-5, metric


def assert_same_weights(run):
    """The server has the weights that are trained, at every step, and they change (not where all rewards are equal)."""
    assert max(run.column("training/rollout_probs_diff_max")) < 1e-4
    assert max(run.column("actor/grad_norm")) > 0


def test_a_run_killed_and_resumed_goes_on_as_it_did(verl_run, tmp_path):
    settings = {"steps": 4, "rollouts": 4, "folder": tmp_path, "save_every": 2}
    killed = verl_run(**settings, kill_after=3)
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "2"
    resumed = verl_run(**settings)
    assert sorted(resumed.steps) == [3, 4]
    for metric in REPEATED:
        assert resumed.steps[3][metric] == pytest.approx(killed.steps[3][metric], abs=1e-4), metric
