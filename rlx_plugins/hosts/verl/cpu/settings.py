"""The environment and the Hydra overrides of a verl run without an accelerator, on one machine with two cores."""

from __future__ import annotations

from collections.abc import Iterable
from os import PathLike
from typing import Any

from .adjustments import PLATFORM, ROLLOUT_NAME

__all__ = ["REPLICAS", "cpu_environment", "cpu_overrides"]

REPLICAS = ("hf", "vllm")
_FLOAT32 = "{param_dtype:fp32,reduce_dtype:fp32,buffer_dtype:fp32}"


def cpu_environment() -> dict[str, str]:
    """Environment variables of the launching process; Ray hands them on to every other one."""
    return {
        "VERL_PLATFORM": PLATFORM,
        "VERL_ENGINE_DEVICE": "cuda",  # selects verl's FSDP engine, registered for accelerators only
        "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # else vLLM wants a core of its own per thread
        "OMP_NUM_THREADS": "1",
        "TORCHDYNAMO_DISABLE": "1",  # else vLLM and verl compile their sampling helpers: 20 seconds
        "TOKENIZERS_PARALLELISM": "false",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_enable_worker_prestart": "0",  # else Ray starts one idle Python per (fictitious) CPU
        "RAY_prestart_worker_first_driver": "0",
        "TQ_NUM_THREADS": "1",
    }


def cpu_overrides(
    model: str | PathLike[str],
    train_files: str | PathLike[str],
    val_files: str | PathLike[str],
    *,
    replica: str = "hf",
    steps: int = 3,
    prompts: int = 8,
    rollouts: int = 8,
    mini_batch: int | None = None,
    micro_batch: int | None = None,
    prompt_length: int = 32,
    response_length: int = 20,
    learning_rate: float = 3e-4,
    ranks: int = 1,
    teacher: str | PathLike[str] | None = None,
    folder: str | PathLike[str] | None = None,
    save_every: int = -1,
    poll_interval: float | None = 0.05,
    reward: tuple[str, str] = ("pkg://rlx_plugins.hosts.verl.cpu.tiny", "compute_score"),
    extra: Iterable[str] = (),
) -> list[str]:
    """Hydra overrides for ``python -m verl.trainer.main_ppo``: what the CPU needs, and GRPO in small.

    ``replica`` is "hf" (transformers in one Ray actor) or "vllm". A step has ``prompts`` prompts with ``rollouts``
    rollouts each and an update per ``mini_batch`` prompts (default: one update a step); a process computes
    ``micro_batch`` rows at a time (default: its share of a mini-batch, which it has to divide). Lengths are in tokens.
    ``ranks`` trains in that many processes. A ``teacher`` model has a server of its own and scores what was generated,
    for verl's distillation losses that need its log-probability of each token. With ``folder`` and ``save_every`` the
    run writes checkpoints there, and resumes from the last one it finds. ``poll_interval`` in seconds takes the place
    of verl's two (``sampler``; for ``trainer_mode=sync``); None keeps verl's own buffer. ``reward`` is a module or file
    and a function in it. ``extra`` comes last.
    Raises ``ValueError`` for an unknown replica.
    """
    if replica not in REPLICAS:
        raise ValueError(f"unknown replica {replica!r}; accepted: {', '.join(REPLICAS)}")
    mini_batch = mini_batch or prompts
    micro_batch = micro_batch or mini_batch * rollouts // ranks
    actor, rollout, algorithm = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "algorithm"
    settings: dict[str, Any] = {
        "trainer.device": "cpu",
        "trainer.n_gpus_per_node": ranks,
        "trainer.nnodes": 1,
        # Ray: a cluster of its own, not one that happens to run on this machine.
        "++ray_kwargs.ray_init.address": "local",
        # Fictitious accelerators and CPUs, for verl reserves three CPUs per training process.
        "+ray_kwargs.ray_init.num_gpus": ranks + (teacher is not None),
        "ray_kwargs.ray_init.num_cpus": 32,
        "+ray_kwargs.ray_init.object_store_memory": 300_000_000,
        "+ray_kwargs.ray_init.include_dashboard": "false",
        # One process of each kind: every further one costs half a gigabyte and its imports.
        f"{rollout}.agent.num_workers": 1,
        "reward.num_workers": 1,
        "transfer_queue.backend.SimpleStorage.num_data_storage_units": 1,
        "data.dataloader_num_workers": 0,
        # Plain float32 without compilation; FSDP1 refuses parameters on the CPU.
        "actor_rollout_ref.model.use_remove_padding": "false",
        "actor_rollout_ref.model.enable_gradient_checkpointing": "false",
        "+actor_rollout_ref.model.override_config.attn_implementation": "sdpa",
        f"{actor}.strategy": "fsdp2",
        f"{actor}.use_torch_compile": "false",
        f"{actor}.fsdp_config.use_torch_compile": "false",
        f"+{actor}.fsdp_config.mixed_precision": _FLOAT32,
        "actor_rollout_ref.ref.use_torch_compile": "false",
        "actor_rollout_ref.ref.fsdp_config.use_torch_compile": "false",
        "+actor_rollout_ref.ref.fsdp_config.mixed_precision": _FLOAT32,
        # Weights go through shared memory in buckets, the largest tensor in one.
        f"{rollout}.checkpoint_engine.update_weights_bucket_megabytes": 16,
        f"{rollout}.name": ROLLOUT_NAME if replica == "hf" else "vllm",
        f"{rollout}.tensor_model_parallel_size": 1,
        f"{rollout}.dtype": "float32",
        f"{rollout}.enforce_eager": "true",
        f"{rollout}.free_cache_engine": "false",
        f"+{rollout}.enable_sleep_mode": "false",
        f"{rollout}.max_model_len": prompt_length + response_length,
        f"{rollout}.max_num_batched_tokens": max(256, prompt_length + response_length),
        f"{rollout}.max_num_seqs": 64,
        # The run.
        "actor_rollout_ref.model.path": model,
        "data.train_files": train_files,
        "data.val_files": val_files,
        "data.seed": 0,
        "data.train_batch_size": prompts,
        "data.max_prompt_length": prompt_length,
        "data.max_response_length": response_length,
        f"{rollout}.n": rollouts,
        f"{rollout}.log_prob_micro_batch_size_per_gpu": micro_batch,
        "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu": micro_batch,
        f"{actor}.ppo_mini_batch_size": mini_batch,
        f"{actor}.ppo_micro_batch_size_per_gpu": micro_batch,
        f"{actor}.optim.lr": learning_rate,
        f"{actor}.optim.weight_decay": 0.0,
        f"{algorithm}.adv_estimator": "grpo",
        "reward.custom_reward_function.path": reward[0],
        "reward.custom_reward_function.name": reward[1],
        "trainer.logger": "[console]",
        "trainer.total_training_steps": steps,
        "trainer.total_epochs": 1000,
        "trainer.val_before_train": "false",
        "trainer.test_freq": -1,
        "trainer.save_freq": save_every,
        "trainer.resume_mode": "disable" if folder is None else "auto",
    }
    if teacher is not None:
        one = "distillation.teacher_models.teacher_model"
        settings |= {
            "distillation.enabled": "true",
            "distillation.n_gpus_per_node": 1,
            "distillation.nnodes": 1,
            f"{one}.key": "teacher",
            f"{one}.model_path": teacher,
            f"{one}.num_replicas": 1,
            f"{one}.inference.tensor_model_parallel_size": 1,
            f"{one}.inference.free_cache_engine": "false",
            f"+{one}.inference.enable_sleep_mode": "false",
            f"{one}.inference.max_model_len": prompt_length + response_length + 1,
            f"{one}.inference.max_num_batched_tokens": max(256, prompt_length + response_length + 1),
            f"{one}.inference.max_num_seqs": 64,
        }
    if folder is not None:
        settings["trainer.default_local_dir"] = folder
    if poll_interval is not None:
        settings |= {
            "trainer.v1.sampler.custom_sampler.path": "pkg://rlx_plugins.hosts.verl.cpu.sampler",
            "trainer.v1.sampler.custom_sampler.name": "EagerReplayBuffer",
            "+trainer.v1.sampler.sampler_kwargs.poll_interval": poll_interval,
        }
    return [f"{key}={value}" for key, value in settings.items()] + list(extra)
