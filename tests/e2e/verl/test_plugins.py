"""Real verl runs with plug-ins: Ray, FSDP2, TransferQueue, rollout servers and reward workers, on the CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent
MODULE = "rlx_plugins.hosts.verl"
PLUGIN = "rlx_plugins.hosts.verl.plugin"
OWN = {
    "VERL_USE_EXTERNAL_MODULES": f"{PLUGIN},own_plugins",
    "PYTHONPATH": f"{HERE.parents[2]}:{HERE}",
}
SMALL = {"prompts": 4, "rollouts": 4}


def same(run, other, metrics, steps, **tolerance):
    for metric in metrics:
        ours = [run.steps[step][metric] for step in steps]
        assert ours == pytest.approx([other.steps[step][metric] for step in steps], **tolerance), metric


def test_grpo_as_plugins_or_by_flags_and_our_trainer_without_plugins_are_verls_grpo(verl_run):
    settings = {**SMALL, "steps": 3}
    twice = "actor_rollout_ref.actor.ppo_epochs=2"  # on the whole batch: its rows come in the order they finished
    stock = verl_run(twice, **settings)
    plugins = verl_run(twice, 'rlx.plugins="advantage=grpo clip=ppo clip.dual_clip=3.0"', module=MODULE, **settings)
    loss = "actor_rollout_ref.actor.policy_loss"
    flags = verl_run(
        twice,
        "algorithm.adv_estimator=rlx.grpo",
        f"{loss}.loss_mode=rlx.ppo",
        f"{loss}._target_=rlx_plugins.hosts.verl.flags.RLXPolicyLossConfig",
        f"+{loss}.params.dual_clip=3.0",
        **settings,
    )
    without = verl_run(twice, module=MODULE, **settings)
    for run in (plugins, flags, without):
        same(run, stock, ["critic/score/mean", "actor/pg_loss", "actor/grad_norm"], [1, 2, 3], abs=2e-5)
    assert any(abs(x) > 1e-3 for x in stock.column("actor/pg_loss"))


def test_a_killed_run_resumed_is_the_run(verl_run, tmp_path):
    settings = {**SMALL, "steps": 4, "save_every": 1, "module": MODULE, "environment": OWN}
    plugins = (
        'rlx.plugins="allocator=test_growing advantage=test_running_mean clip=test_counting'
        ' ratio=token ratio.denominator=logp_prox"'
    )
    # without seeds, rows of a prompt draw in the order their requests arrive
    flags = (plugins, "rlx.prox_decay=0.5", "rlx.request_seeds=true")
    whole = verl_run(*flags, folder=tmp_path / "whole", **settings)
    killed = verl_run(*flags, folder=tmp_path / "killed", kill_after=2, **settings)
    resumed = verl_run(*flags, folder=tmp_path / "killed", **settings)
    assert 1 not in resumed.steps and sorted({**killed.steps, **resumed.steps}) == [1, 2, 3, 4]
    later = sorted(resumed.steps)
    exact = ["rlx/clip/calls", "rlx/allocator/seen", "rlx/rows", "critic/score/mean"]
    same(resumed, whole, exact, later, abs=0)
    same(resumed, whole, ["actor/pg_loss", "actor/grad_norm"], later, rel=1e-3)
    assert whole.steps[4]["rlx/clip/calls"] > whole.steps[1]["rlx/clip/calls"]
    assert whole.steps[4]["rlx/allocator/seen"] == 16


def test_stale_rollouts_are_seen_as_such_in_asynchronous_mode(verl_run):
    plugins = 'rlx.plugins="correction=decoupled_ppo clip=test_behavior clip.denominator=logp_old"'
    mode = "trainer.v1.trainer_mode=rlx_colocate_async"
    run = verl_run(plugins, mode, "rlx.keep_versions=2", module=MODULE, environment=OWN, steps=4, **SMALL)
    assert run.column("rlx/staleness/max") == run.column("training/off_policy/trajectory_staleness/max")
    assert set(run.column("rlx/staleness/max")) == {0, 1}
    for step in run.steps.values():
        fresh = step["rlx/staleness/max"] == 0
        assert (abs(step["rlx/correction/decoupled_ppo/weight_mean"] - 1) < 1e-4) == fresh
        # the replica samples in the trainer's arithmetic: the version that sampled says what it reported
        assert step["rlx/clip/behavior_is_off"] < 1e-4 and (step["rlx/clip/old_is_off"] < 1e-4) == fresh
        assert (step["rlx/clip/top_is_off"] < 1e-4) == fresh and step["rlx/clip/top_is_off"] < torch.inf
        assert step["rlx/old_logits/missing"] == 0


def test_the_rollout_program_runs_with_rounds_hints_hidden_states_and_prompts_of_its_own_choice(verl_run, verl_inputs):
    plugins = (
        'rlx.plugins="sampler=vade allocator=vigor hint=guide hint.column=solution hint.behavior_logp=forward'
        f' hint.success_threshold=0.5 clip=pdm reward=test_states reward.path={verl_inputs["model"]}"'
    )
    validation = ("data.val_max_samples=8", "trainer.val_before_train=true", "trainer.test_freq=2")
    run = verl_run(plugins, "rlx.generation_chunk=8", *validation, module=MODULE, environment=OWN, steps=2, **SMALL)
    assert {0, 2} <= {step for step, data in run.steps.items() if any(name.startswith("val-") for name in data)}
    run.steps.pop(0)
    assert all(rows > 0 for rows in run.column("rlx/rows"))
    assert sum(run.column("rlx/hint/guide_triggered")) > 0
    before, after_an_update = run.column("rlx/reward/states_are_off")
    assert before < 1e-4 < 1e-3 < after_an_update  # the states are those of the policy as it is
    assert min(run.column("actor/grad_norm")) > 0
    # the engine saw hints that training leaves out, and the policy moves within the step
    assert 0.01 < max(run.column("rlx/clip/divergence")) < 1 and min(run.column("rlx/clip/dropped")) >= 0


def test_the_rollout_program_runs_on_vllm(verl_run):
    plugins = (
        'rlx.plugins="allocator=vigor allocator.total_rollouts=16 advantage=gdpo clip=pdm clip.denominator=logp_old'
        ' correction=tis"'
    )
    run = verl_run(plugins, "rlx.generation_chunk=8", module=MODULE, replica="vllm", steps=2, **SMALL)
    assert run.column("rlx/rows") == run.column("rlx/allocator/vigor_rollouts")
    assert min(run.column("rlx/correction/tis/effective_sample_size")) > 0.99
    assert all(0 < x < 1e-4 for x in run.column("rlx/clip/divergence"))  # other arithmetic, the same weights
    assert max(run.column("actor/grad_norm")) > 0


def test_every_update_kind_on_two_ranks_of_verls_own_command(verl_run):
    environment = {**OWN, "VERL_USE_EXTERNAL_MODULES": f"{PLUGIN},own_plugins,rlx_plugins.hosts.verl.trainer"}
    weights = "+reward.custom_reward_function.reward_kwargs"
    run = verl_run(
        "trainer.v1.trainer_mode=rlx_sync",
        '+rlx.plugins="reward=lead advantage=lead correction=tis aggregate=seq_mean_token_mean selector=nat_rpc'
        ' clip=test_logits"',
        "+rlx.reward_components=[accuracy,format]",
        f"{weights}.format=0.5",
        "actor_rollout_ref.actor.use_kl_loss=true",
        "actor_rollout_ref.actor.entropy_coeff=0.001",
        "actor_rollout_ref.rollout.temperature=0.8",
        environment=environment,
        steps=2,
        ranks=2,
        **SMALL,
    )
    assert max(run.column("rlx/clip/difference")) < 1e-5
    assert max(run.column("rlx/clip/top_is_off")) < 1e-4
    assert all(0 < kept < 1 for kept in run.column("rlx/selector/kept_tokens"))
    assert min(run.column("actor/grad_norm")) > 0 and min(run.column("actor/entropy_loss")) > 0
    assert run.column("actor/kl_loss")[0] == pytest.approx(0, abs=1e-5)
