"""What this host relies on in TRL, transformers and accelerate, and whether the installed versions still have it."""

from __future__ import annotations

from ..contracts import check_attributes, check_fields, check_mentions, check_parameters

PARAMETERS: dict[str, str] = {
    "trl.GRPOTrainer.__init__": "self model reward_funcs args train_dataset eval_dataset processing_class"
    " reward_processing_classes callbacks optimizers quantization_config peft_config tools rollout_func"
    " environment_factory",
    "trl.GRPOTrainer._calculate_rewards": "self inputs prompts completions completion_ids_list",
    "trl.GRPOTrainer._generate_single_turn": "self prompt_ids images multimodal_fields num_generations has_tool_images",
    "trl.GRPOTrainer._generate_and_score_completions": "self inputs",
    "trl.GRPOTrainer._tokenize_prompts": "self prompts",
    "trl.GRPOTrainer._get_per_token_logps_and_entropies": "self model input_ids attention_mask logits_to_keep"
    " batch_size compute_entropy compute_aux_loss pixel_values image_grid_thw num_images pixel_attention_mask"
    " spatial_shapes"
    " num_tiles image_sizes token_type_ids mm_token_type_ids image_position_ids",
    "trl.GRPOTrainer._compute_loss": "self model inputs",
    "trl.GRPOTrainer._get_train_sampler": "self dataset",
    "trl.GRPOTrainer._save_checkpoint": "self model trial",
    "trl.GRPOTrainer._load_optimizer_and_scheduler": "self checkpoint",
    "trl.generation.vllm_generation.VLLMGeneration.generate": "self prompts images num_generations profiler",
    "trl.trainer.utils.pad": "tensors padding_value padding_side pad_to_multiple_of",
    "trl.trainer.utils.add_fused_lm_head": "model temperature cast_lm_head_to_fp32 outputs",
    "trl.models.utils.disable_gradient_checkpointing": "model gradient_checkpointing_kwargs",
    "trl.models.utils.unwrap_model_for_generation": "model accelerator gather_deepspeed3_params generation_kwargs"
    " gradient_checkpointing_kwargs",
    "transformers.Trainer._get_output_dir": "self trial",
    "transformers.Trainer.train": "self resume_from_checkpoint trial ignore_keys_for_eval",
    "accelerate.utils.broadcast_object_list": "object_list from_process",
    "accelerate.utils.gather_object": "object",
}
"""Function -> its parameters, in order."""

ATTRIBUTES: dict[str, str] = {
    "trl.GRPOTrainer": "eos_token_ids num_generations max_completion_length temperature rollout_func use_vllm tools"
    " beta reward_weights reward_func_names generation_config vllm_generation vllm_mode _tokenizer _is_vlm"
    " _metrics _logs _step _buffered_inputs _pending_extra_logs _entropy_bonus_enabled _last_world_entropy entropy_coef"
    " use_adaptive_entropy aux_loss_enabled router_aux_loss_coef",
    "trl.generation.vllm_generation.VLLMGeneration": "temperature max_completion_length logprobs",
    "trl.trainer.utils.RepeatSampler": "shuffle generator num_samples",
}
"""Class -> attributes its constructor sets."""

MENTIONS: dict[str, str] = {
    "trl.GRPOTrainer._generate_and_score_completions": '"prompt_ids" "prompt_mask" "completion_ids" "completion_mask"'
    ' "advantages" "old_per_token_logps" "ref_per_token_logps" "sampling_per_token_logps" "importance_sampling_ratio"'
    ' "tool_mask" self._generate( self._calculate_rewards( _logs["advantages"] inp[key]=values[i]',
    "trl.GRPOTrainer._calculate_rewards": 'reward_kwargs["log_extra"]=self._log_completion_extra',
    "trl.GRPOTrainer._log_completion_extra": "self._pending_extra_logs[column].extend(values)",
    "trl.GRPOTrainer._generate": "completions/clipped_ratio completions/mean_terminated_length"
    " self.rollout_func(prompts, self) env_mask self._generate_single_turn(",
    "trl.GRPOTrainer._generate_single_turn": "self.vllm_generation.generate( [[lp[0]forlpinseq]forseqinlogprobs]",
    "trl.generation.vllm_generation.VLLMGeneration.generate": '"logprobs":self.logprobs'
    ' output.get("logprob_token_ids") extract_logprobs(all_outputs)',
    "trl.generation.vllm_generation.VLLMGeneration._init_vllm": 'logprobs_mode="processed_logprobs"',
    "trl.generation.vllm_generation.extract_logprobs": "sorted(lp.items(),key=lambdax:x[1].rank)",
    "trl.GRPOTrainer._compute_loss": "self._get_per_token_logps_and_entropies( compute_entropy=True"
    ' inputs["advantages"] advantages.dim()',
    "trl.GRPOTrainer._prepare_inputs": "self._generate_and_score_completions( shuffle_sequence_dict("
    " split_tensor_dict( self._step%generate_every self._buffered_inputs[self._step%self.args.steps_per_generation]",
    "transformers.Trainer._inner_training_loop": "self._init_training_state( self._prepare_for_training("
    " self._run_epoch( self.control.should_training_stop:break",
    "transformers.Trainer._run_epoch": "self.current_gradient_accumulation_steps=len(batch_samples)"
    " _set_sync_gradients(do_sync_step) self.callback_handler.on_step_end( self._maybe_log_save_evaluate(",
}
"""Function -> fragments of its source, blanks left out, that show it still works the way this host assumes."""

FIELDS = (
    "steps_per_generation generation_batch_size num_iterations num_generations max_completion_length temperature beta"
    " use_vllm use_transformers_continuous_batching vllm_importance_sampling_correction use_bias_correction_kl"
    " loss_type importance_sampling_level epsilon epsilon_high delta scale_rewards multi_objective_aggregation"
    " top_entropy_quantile off_policy_mask_threshold entropy_target mask_truncated_completions reward_weights"
)
"""Fields of `GRPOConfig` that are read."""


def check_seams() -> list[str]:
    """One message for each thing relied on that the installed versions no longer have; [] if all holds."""
    problems = check_parameters(PARAMETERS) + check_attributes(ATTRIBUTES) + check_mentions(MENTIONS)
    return problems + check_fields("trl.GRPOConfig", FIELDS)
