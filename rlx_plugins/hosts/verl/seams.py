"""What this host relies on in verl, TransferQueue, Ray and transformers, and what of it the installed versions lack."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from ..contracts import check_attributes, check_fields, check_mentions, check_parameters, where

PARAMETERS: dict[str, str] = {
    # registry functions
    "verl.trainer.ppo.core_algos.register_adv_est": "name_or_enum",
    "verl.trainer.ppo.core_algos.register_policy_loss": "name",
    "verl.trainer.ppo.core_algos.agg_loss": "loss_mat loss_mask loss_agg_mode dp_size batch_num_tokens"
    " global_batch_size loss_scale_factor",
    "verl.trainer.ppo.core_algos.kl_penalty": "logprob ref_logprob kl_penalty",
    "verl.trainer.ppo.v1.trainer_base.register_trainer": "name",
    # the trainer
    "verl.trainer.main_ppo.run_ppo": "config task_runner_class",
    "verl.trainer.ppo.v1.trainer_base.PPOTrainer.__init__": "self config",
    "verl.trainer.ppo.v1.trainer_base.PPOTrainer._setup": "self",
    "verl.trainer.ppo.v1.trainer_base.PPOTrainer._init_tokenizer": "self",
    "verl.trainer.ppo.v1.trainer_base.PPOTrainer.on_init_end": "self",
    "verl.trainer.ppo.v1.trainer_base.PPOTrainer.get_llm_client": "self",
    "verl.trainer.ppo.v1.trainer_base.PPOTrainer.get_reward_handles": "self",
    "verl.trainer.ppo.v1.trainer_base.PPOTrainer.prepare_step": "self",
    "verl.trainer.ppo.v1.trainer_base.PPOTrainer._fetch_one_gen_batch": "self",
    "verl.trainer.ppo.v1.trainer_base.PPOTrainer._compute_advantage": "self batch metrics",
    "verl.trainer.ppo.v1.trainer_base.PPOTrainer._update_actor": "self batch metrics",
    "verl.trainer.ppo.v1.trainer_base.PPOTrainer.on_step_end": "self",
    "verl.trainer.ppo.v1.trainer_base.PPOTrainer.on_train_end": "self",
    "verl.trainer.ppo.v1.trainer_base.PPOTrainer._validate": "self",
    "verl.trainer.ppo.v1.trainer_base.PPOTrainer._save_checkpoint": "self",
    "verl.trainer.ppo.v1.trainer_base.PPOTrainer._load_checkpoint": "self",
    "verl.utils.metric.reduce_metrics": "metrics",
    "verl.utils.metric.Metric.__init__": "self aggregation value",
    # the worker's loss
    "verl.workers.engine_workers.ActorRolloutRefWorker.set_loss_fn": "self loss_fn",
    "verl.workers.engine_workers.ActorRolloutRefWorker.update_actor": "self data",
    "verl.workers.engine_workers.ActorRolloutRefWorker.compute_log_prob": "self data",
    "verl.workers.engine_workers.TrainingWorker.infer_batch": "self data",
    "verl.workers.utils.padding.no_padding_2_padding": "tensor data",
    "verl.workers.utils.padding.response_from_nested": "tensor response_mask",
    "transformers.PreTrainedModel.get_output_embeddings": "self",
    # replay buffer, agent loops, engine
    "verl.trainer.ppo.v1.replay_buffer.ReplayBuffer.sample": "self global_steps partition_id batch_size",
    "verl.workers.rollout.llm_server.LLMServerClient.generate": "self request_id prompt_ids sampling_params image_data"
    " video_data audio_data mm_processor_kwargs kwargs",
    "verl.workers.rollout.llm_server.LLMServerManager.get_client": "self client_cls kwargs",
    "verl.workers.rollout.replica.RolloutReplicaRegistry.register": "name loader",
    # TransferQueue
    "transfer_queue.kv_batch_get": "keys partition_id select_fields",
    "transfer_queue.kv_batch_put": "keys partition_id fields tags data_parser",
    "transfer_queue.kv_clear": "keys partition_id",
}
"""Function -> its parameters, in order."""

ATTRIBUTES: dict[str, str] = {
    "verl.trainer.ppo.v1.trainer_base.PPOTrainer": "config trainer_mode replay_buffer use_critic",
    "verl.workers.engine_workers.ActorRolloutRefWorker": "actor",
    "verl.workers.engine_workers.TrainingWorker": "engine loss_fn",
    "verl.trainer.ppo.v1.replay_buffer.ReplayBuffer": "sampler_kwargs poll_interval",
}
"""Class -> attributes its constructor sets."""

MENTIONS: dict[str, str] = {
    "verl.trainer.ppo.v1.trainer_base.PPOTrainer._step_once": "self.replay_buffer.sample( self._balance_batch("
    " self._compute_old_log_prob( self._compute_advantage( self._update_actor(",
    "verl.trainer.ppo.v1.trainer_base.PPOTrainer._setup": "self._load_checkpoint()",
    "verl.trainer.ppo.v1.trainer_base.PPOTrainer.init": "self._setup() self.on_init_end()",
    "verl.trainer.ppo.v1.trainer_base.PPOTrainer._compute_old_log_prob": '"old_log_probs" "entropy"',
    "verl.trainer.ppo.v1.trainer_base.PPOTrainer._compute_ref_log_prob": '"ref_log_prob"',
    "verl.trainer.ppo.v1.trainer_base.PPOTrainer._compute_values": '"values"',
    "verl.trainer.ppo.v1.trainer_base.PPOTrainer._update_critic": "self.critic_wg.train_mini_batch(",
    "verl.workers.utils.losses.value_loss": '"values","returns","response_mask"',
    "verl.trainer.ppo.utils.need_critic": "config.critic.enable",
    "verl.workers.engine_workers.TrainingWorker.infer_batch": 'key="compute_loss" loss_function=self.loss_fn',
    "verl.workers.engine.fsdp.transformer_impl.FSDPEngine._build_model_optimizer": "self.module=module"
    " self.optimizer=optimizer",
    "verl.single_controller.ray.base.create_colocated_worker_cls": "self.worker_dict[key]=user_defined_cls(",
    "verl.trainer.ppo.v1.trainer_base.PPOTrainer._update_actor": '"calculate_entropy" "distillation_use_topk"'
    ' "distillation_only" "global_batch_size" "mini_batch_size" "epochs" "seed" "dataloader_kwargs" "temperature"',
    "verl.trainer.ppo.v1.trainer_base.PPOTrainer._save_checkpoint": "global_step_ latest_checkpointed_iteration.txt",
    "verl.trainer.ppo.v1.trainer_base.PPOTrainer.fit": "self.global_steps<=self.total_training_steps:"
    " self.on_train_end() tq.kv_clear(keys=batch.keys",
    "verl.trainer.main_ppo.main": "validate_config( run_ppo(",
    "verl.trainer.ppo.padding_utils.construct_minimal_padding_template": "is_padding=True response_len=1",
    "verl.trainer.ppo.v1.agent_loop_tq.AgentLoopWorkerTQ": 'f"{uid}_{session_id}_{i}" "min_global_steps" "loss_mask"'
    ' "input_ids" "position_ids" "multi_modal_inputs"',
    "verl.experimental.agent_loop.AgentLoopOutput.as_dict": '"prompts" "responses" "response_mask"'
    ' "rollout_log_probs" "rm_scores" "extra_fields"',
    "verl.experimental.agent_loop.single_turn_agent_loop.SingleTurnAgentLoop": "self.server_manager.generate("
    " sampling_params=sampling_params extra_fields=output.extra_fields",
    "verl.workers.rollout.llm_server.LLMServerClient.generate": "sampling_params=sampling_params returnoutput",
    "verl.experimental.agent_loop.AgentLoopWorker._compute_score": "compute_score.remote(data)"
    ' "reward_extra_info" "tool_extra_fields" "__num_turns__"',
    "verl.workers.engine_workers.TrainingWorker.train_mini_batch": "Metric.aggregate_dp"
    " mini_batch_size//self.engine.get_data_parallel_size()",
    "verl.workers.engine_workers.TrainingWorker.train_batch": "micro_batch_size_per_gpu=",
    "verl.workers.engine.fsdp.transformer_impl.FSDPEngine.forward_backward_batch": "dp_size= prepare_micro_batches(",
    "verl.workers.engine.fsdp.transformer_impl.FSDPEngineWithLMHead.forward_step": "model_output=model_output"
    " data=micro_batch dp_group= detach_tree(model_output)",
    "verl.workers.engine.fsdp.transformer_impl.FSDPEngineWithLMHead.prepare_model_inputs": "pad_packed_inputs("
    " input_ids.values().unsqueeze(0) torch.nested.to_padded_tensor(",
    "verl.workers.engine.utils.postprocess_batch_func": "nt.unbind() restore_dynamic_batch(model_output[key],indices)",
    "verl.workers.engine.fsdp.transformer_impl.FSDPEngineWithLMHead.prepare_model_outputs": "distillation_use_topk"
    " student_logits=logits_rmpad.unsqueeze(0) calculate_entropy ifnotdistillation_only:",
    "verl.utils.transferqueue_utils._async_meta_to_realdata": "meta.extra_info",
    "ray.actor": "def__ray_call__( __ray_actor_class__=cls",
    "verl.workers.rollout.llm_server.FullyAsyncLLMServerClient.generate": "super().generate(",
}
"""Function or class -> fragments of its source, blanks left out, that show it still works the way this host assumes."""

VLLM_SERVER = (
    "def generate(self, prompt_ids: list[int], sampling_params: dict[str, Any], request_id: str,",
    'sampling_params["logprobs"] = 0 if sampling_params.pop("logprobs", False) else None',
    "self.engine.generate(prompt=prompt, sampling_params=sampling_params, request_id=request_id,",
    "log_probs = [logprobs[token_ids[i]].logprob for i, logprobs in enumerate(final_res.outputs[0].logprobs)]",
    "self.engine = engine_client",
    "async def run_server(self, args: argparse.Namespace):",
    "self.server_class = ray.remote(vLLMHttpServer)",
    "server = self.server_class.options(",
)
"""Fragments of verl's vLLM server, a module that can't be imported where vLLM is missing, blanks left out."""

CONFIG: tuple[str, ...] = (
    "algorithm.adv_estimator",
    "algorithm.norm_adv_by_std_in_grpo",
    "algorithm.use_kl_in_reward",
    "algorithm.filter_groups.enable",
    "algorithm.rollout_correction.rollout_is",
    "algorithm.rollout_correction.rollout_rs",
    "algorithm.rollout_correction.bypass_mode",
    "actor_rollout_ref.actor.policy_loss.loss_mode",
    "actor_rollout_ref.actor.loss_agg_mode",
    "actor_rollout_ref.actor.loss_scale_factor",
    "actor_rollout_ref.actor.clip_ratio",
    "actor_rollout_ref.actor.clip_ratio_low",
    "actor_rollout_ref.actor.clip_ratio_high",
    "actor_rollout_ref.actor.clip_ratio_c",
    "actor_rollout_ref.actor.use_kl_loss",
    "actor_rollout_ref.actor.kl_loss_coef",
    "actor_rollout_ref.actor.kl_loss_type",
    "actor_rollout_ref.actor.entropy_coeff",
    "actor_rollout_ref.actor.calculate_entropy",
    "actor_rollout_ref.actor.shuffle",
    "actor_rollout_ref.actor.ppo_epochs",
    "actor_rollout_ref.actor.data_loader_seed",
    "actor_rollout_ref.actor.ppo_mini_batch_size",
    "actor_rollout_ref.rollout.calculate_log_probs",
    "actor_rollout_ref.rollout.temperature",
    "actor_rollout_ref.rollout.n",
    "actor_rollout_ref.rollout.logprobs_mode",
    "actor_rollout_ref.rollout.disaggregation.enabled",
    "actor_rollout_ref.rollout.agent.default_agent_loop",
    "critic.enable",
    "actor_rollout_ref.actor.strategy",
    "data.train_files",
    "data.prompt_key",
    "distillation.enabled",
    "reward.reward_model.enable",
    "trainer.v1.trainer_mode",
    "trainer.critic_warmup",
    "trainer.use_v1",
)
"""Entries of verl's configuration that are read or set."""


def check_seams() -> list[str]:
    """One message for each thing relied on that the installed versions no longer have; [] if all holds."""
    try:
        importlib.import_module("verl")
        failures = importlib.import_module(f"{__package__}.plugin").failures
    except Exception as error:  # whatever verl's import raises is the report
        return [f"{where('verl')}: the entry point rlx can't be loaded: {type(error).__name__}: {error}"]
    problems = [f"{where('verl')}: {failure}" for failure in failures]
    problems += check_parameters(PARAMETERS) + check_attributes(ATTRIBUTES) + check_mentions(MENTIONS)
    problems += _config_problems() + _vllm_server_problems()
    problems += check_fields("verl.workers.config.PolicyLossConfig", "loss_mode")
    return problems


def _config_problems() -> list[str]:
    config = stock_config()
    missing = []
    for path in CONFIG:
        node: Any = config
        for name in path.split("."):
            if not hasattr(node, "keys") or name not in node:
                missing.append(f"{where('verl')}: its configuration has no {path}")
                break
            node = node[name]
    return missing


def _vllm_server_problems() -> list[str]:
    path = "workers/rollout/vllm_rollout/vllm_async_server.py"
    file = Path(importlib.import_module("verl").__file__ or "").parent / path
    if not file.exists():
        return [f"{where('verl')}: {path} is gone"]
    source = "".join(file.read_text().split())
    gone = [fragment for fragment in VLLM_SERVER if "".join(fragment.split()) not in source]
    return [f"{where('verl')}: {path} no longer contains {fragment}" for fragment in gone]


def stock_config() -> Any:
    """verl's configuration as `python -m rlx_plugins.hosts.verl` composes it, without overrides."""
    from hydra import compose, initialize_config_module
    from hydra.core.global_hydra import GlobalHydra

    GlobalHydra.instance().clear()
    with initialize_config_module(f"{__package__}.config", version_base=None):
        return compose("rlx_trainer")
