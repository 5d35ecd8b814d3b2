"""The overrides are verl's own keys, and say what they are meant to say."""

from __future__ import annotations

import pytest

pytest.importorskip("verl")

from rlx_plugins.hosts.verl.cpu import cpu_environment, cpu_overrides

FILES = {"model": "m", "train_files": "t.parquet", "val_files": "v.parquet"}


def composed(**settings):
    from hydra import compose, initialize_config_module

    with initialize_config_module("verl.trainer.config", version_base=None):
        return compose("ppo_trainer", cpu_overrides(**FILES, **settings))


@pytest.mark.parametrize("replica", ["hf", "vllm"])
def test_verl_accepts_every_override(replica):
    config = composed(replica=replica, steps=5, folder="/checkpoints", save_every=2)
    assert config.trainer.device == "cpu"
    assert config.trainer.default_local_dir == "/checkpoints"
    assert config.actor_rollout_ref.rollout.name == {"hf": "rlx_hf", "vllm": "vllm"}[replica]
    assert config.actor_rollout_ref.model.path == "m"


def test_a_micro_batch_is_a_mini_batch_unless_it_is_given():
    actor = composed(prompts=8, rollouts=4, mini_batch=4, ranks=2).actor_rollout_ref.actor
    assert (actor.ppo_mini_batch_size, actor.ppo_micro_batch_size_per_gpu) == (4, 8)
    assert composed(micro_batch=2).actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu == 2


def test_a_teacher_has_an_accelerator_of_its_own():
    config = composed(ranks=2, teacher="t")
    assert config.ray_kwargs.ray_init.num_gpus == 3
    assert config.distillation.enabled
    assert config.distillation.teacher_models.teacher_model.inference.name == "rlx_hf"


def test_what_is_given_last_wins():
    assert composed(extra=["actor_rollout_ref.actor.optim.lr=1"]).actor_rollout_ref.actor.optim.lr == 1


def test_the_buffer_of_verl_stays_without_an_interval():
    assert composed(poll_interval=None).trainer.v1.sampler.custom_sampler.path is None
    assert composed(poll_interval=0.5).trainer.v1.sampler.sampler_kwargs.poll_interval == 0.5


def test_an_unknown_replica_is_refused():
    with pytest.raises(ValueError, match="unknown replica 'sglang'; accepted: hf, vllm"):
        cpu_overrides(**FILES, replica="sglang")


def test_the_environment_chooses_the_platform():
    assert cpu_environment()["VERL_PLATFORM"] == "cpu"


def test_the_command_line_is_a_run_on_the_tiny_task(monkeypatch):
    from rlx_plugins.hosts.verl.cpu import __main__ as cpu_main

    monkeypatch.setattr(cpu_main, "tiny_model_path", lambda: "model")
    monkeypatch.setattr(cpu_main, "tiny_files", lambda: ("train", "eval"))
    run = cpu_main.command(["--stock", "--replica", "vllm", "--steps", "7", "algorithm.adv_estimator=rloo"])
    assert run[1:3] == ["-m", "verl.trainer.main_ppo"]
    assert {"actor_rollout_ref.rollout.name=vllm", "trainer.total_training_steps=7", "data.val_files=eval"} < set(run)
    assert run[-1] == "algorithm.adv_estimator=rloo"
    assert cpu_main.command([])[2] == "rlx_plugins.hosts.verl"
