"""`RLXTrainer`: TRL's `GRPOTrainer` with plug-ins of every kind, by overriding a few of its methods."""

from __future__ import annotations

import functools
import inspect
import logging
import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import TrainerCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from trl import GRPOTrainer
from trl.data_utils import is_conversational

from ...core.batch import RolloutBatch
from ...core.config import Parts, build
from ...core.context import Context
from ...core.errors import ConfigError
from ...core.objective import policy_loss
from ...core.preparation import prepare
from ...core.trajectory import Top
from ..loss_terms import count_columns, micro_terms, refuse_nan
from ..signals import PRIOR, TOP_TOKENS
from ..value_model import Priors, ValueFunction, load_value_model
from .averaged import AveragedPolicy
from .batches import Needs, check_fields, generated_batch, program_batch
from .checkpoint import latest, load_parts, save_parts
from .columns import LOG_PROBS, PREFIX, cut_responses, micro_batch, own_rows
from .config import check_options, check_saving, corrects_sampling, needs_program
from .inputs import PROMPT_KEY, named_in_errors, unique_names, with_prompt_keys
from .losses import host_terms, window_totals, with_micro_scope
from .profile import host_profile
from .rollouts import Prompts, Rollouts, as_rollout_func_output, run_program
from .teacher import Teacher
from .top_tokens import check_server, top_tokens_asked

logger = logging.getLogger(__name__)


class RLXTrainer(GRPOTrainer):
    """`GRPOTrainer` that runs the plug-ins of `RLXConfig.plugins`; without any, every override hands on to the parent.

    What changes with respect to the parent when plug-ins are named:
    - `_generate_and_score_completions`: rollout-side parts run as the rollout program, whose finished rows the parent
      receives like those of a `rollout_func`; then the batch phase runs on the rows of all ranks and its columns join
      the parent's dictionary.
    - `_compute_loss`: the parent computes its metrics without gradient; the loss is the plug-ins', plus the parent's
      beta * KL, entropy bonus and router loss.
    - `_save_checkpoint`, `_load_optimizer_and_scheduler`, `train`: the state of the parts goes with the trainer's.

    Evaluation is the parent's. Raises ConfigError before the model is loaded.

    parts            the plug-ins, None without any
    needs            what they read
    component_names  TRL's reward functions by name, each name once
    components       [N,K] raw rewards of all ranks' rows of the generation batch, NaN where a function answered None
    teacher          the teacher that parts read, if `teacher_model` names one
    averaged         the averaged policy behind logp_prox, if `prox_decay` asks for one
    value_model      what `value_model` names
    reported         what reward functions told `log_extra` about this rank's completions, by name
    response_lengths  tokens of this rank's completions
    reports_top_tokens  vLLM is asked for its likeliest tokens, because a part reads them
    top_tokens       what it reported for this rank's rows when it was last called
    """

    parts: Parts | None = None
    needs: Needs
    component_names: list[str]
    components: Tensor
    teacher: Teacher | None
    averaged: AveragedPolicy | None
    value_model: ValueFunction | None
    reported: dict[str, list[Any]]
    response_lengths: list[int]
    reports_top_tokens: bool = False
    top_tokens: list[Top]

    def __init__(
        self,
        model: Any,
        reward_funcs: Any = None,
        args: Any = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        reward_processing_classes: Any = None,
        callbacks: Any = None,
        *others: Any,
        **named: Any,
    ):
        if getattr(args, "plugins", None):
            signature = inspect.signature(GRPOTrainer.__init__)
            given = signature.bind_partial(
                self, model, reward_funcs, args, train_dataset, eval_dataset, processing_class,
                reward_processing_classes, callbacks, *others, **named,
            ).arguments  # fmt: skip
            own_rollouts = any(given.get(name) for name in ("rollout_func", "tools", "environment_factory"))
            self.parts = checked_parts(args, train_dataset, own_rollouts=own_rollouts)
            if args.vllm_importance_sampling_correction and corrects_sampling(self.parts):
                args.vllm_importance_sampling_correction = False
                logger.info("vllm_importance_sampling_correction is off: a plug-in corrects the same mismatch")
            train_dataset = with_prompt_keys(train_dataset)
            reward_funcs = named_in_errors(reward_funcs)
            callbacks = [*(callbacks or []), _StepEnd(self)]
        super().__init__(
            model, reward_funcs, args, train_dataset, eval_dataset, processing_class, reward_processing_classes,
            callbacks, *others, **named,
        )  # fmt: skip
        if self.parts is not None:
            self._set_up(self.parts)

    def _set_up(self, parts: Parts) -> None:
        self._program = needs_program(parts)
        if self._program and self._is_vlm:
            raise ConfigError("rollout-side plug-ins work on text only; this model's processor is multimodal")
        self._needs_logits = bool(parts.with_hook("from_logits"))
        self.needs = Needs.of(parts, self.train_dataset, self.args.rollout_signals or ())
        if self.needs.likeliest and self._is_vlm:
            made = ", ".join(sorted(self.needs.likeliest))
            raise ConfigError(f"{made}: made on text only; this model's processor is multimodal")
        if self.use_vllm and self.needs.likeliest & TOP_TOKENS:
            self.reports_top_tokens = True
            check_server(self)
        self._token_columns = frozenset().union(*(getattr(p, "token_columns", ()) for p in parts))
        self._counts, self._micro_terms = count_columns(parts), micro_terms(parts)
        self.component_names = unique_names(self.reward_func_names)
        self._made: Rollouts | None = None
        self._prepared: RolloutBatch | None = None
        self._context: Context | None = None
        self._values: dict[str, Any] = {}
        self._window: dict[str, Tensor] | None = None
        self._live: tuple[Tensor, Tensor, Tensor | None] | None = None
        self._capturing = False
        self._empty_rows: list[int] = []
        self.teacher = Teacher(self, self.args.teacher_model) if self.args.teacher_model is not None else None
        self.averaged = AveragedPolicy(self, self.args.prox_decay) if self.args.prox_decay is not None else None
        self.value_model = self._load_value_model()
        self._priors = Priors.wanted(parts, self.value_model, self.eos_token_ids[0])
        self._needs_teacher_logits = any("teacher_logits" in p.capabilities for p in parts)
        for part in parts["quant"]:
            wrapped = part.wrap(self.model)
            if wrapped is not self.model:
                self.model = self.model_wrapped = wrapped

    def _load_value_model(self) -> ValueFunction | None:
        if self.args.value_model is None or not self.needs.values:
            return None
        return load_value_model(
            self.args.value_model,
            vocabulary=len(self._tokenizer),
            device=self.accelerator.device,
            dtype=self.model.dtype,
            batch_size=self.args.per_device_train_batch_size,
        )

    # ---- the dataset, by prompt key
    @functools.cached_property
    def _row_of(self) -> dict[str, int]:
        rows: dict[str, int] = {}
        for i, key in enumerate(self.train_dataset[PROMPT_KEY]):
            rows.setdefault(key, i)
        return rows

    @functools.cached_property
    def prompts(self) -> Prompts:
        """Token ids of the training prompts by key."""
        return Prompts(self, self._row_of)

    def dataset_row(self, key: str) -> dict[str, Any]:
        """The dataset's row of a prompt."""
        return self.train_dataset[self._row_of[key]]

    def dataset_columns(self, key: str) -> dict[str, Any]:
        """What parts are told about a prompt: its row, with the text columns they want as tokens tokenised."""
        row = {name: value for name, value in self.dataset_row(key).items() if name not in ("prompt", PROMPT_KEY)}
        for name in self._token_columns:
            if isinstance(row[name], str):
                row[name] = self._tokenizer(row[name], add_special_tokens=False)["input_ids"]
        if self._priors is not None and PRIOR not in row:
            row[PRIOR] = self._priors.of(key, self.prompts[key])
        return row

    def decode(self, prompts: list[Any], tokens: list[list[int]]) -> list[Any]:
        """Completions as TRL hands them to reward functions."""
        texts = self.processing_class.batch_decode(tokens, skip_special_tokens=True)
        if is_conversational({"prompt": prompts[0]}):
            return [[{"role": "assistant", "content": text}] for text in texts]
        return texts

    def score_completions(self, inputs: Any, prompts: Any, completions: Any, tokens: Any) -> Tensor:
        """TRL's rewards [N,K] of all ranks' completions; NaN where a function answered None."""
        return super()._calculate_rewards(inputs, prompts, completions, tokens)

    # ---- rollouts
    def _calculate_rewards(self, inputs: Any, prompts: Any, completions: Any, completion_ids_list: Any) -> Tensor:
        if self.parts is None:
            return super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        self.response_lengths = [len(ids) for ids in completion_ids_list]
        if self._made is not None:
            ranks = range(self.accelerator.num_processes)
            self.components = torch.cat([self._made.components_of(self._made.mine(r)) for r in ranks])
            self._pending_extra_logs.update(self._extra_logs(self._made))
        else:
            check_fields(inputs, self.needs.supplied)
            self.components = self.score_completions(inputs, prompts, completions, completion_ids_list)
            self.reported = {name: list(values) for name, values in self._pending_extra_logs.items()}
        return self.components

    def _generate_single_turn(self, prompt_ids: Any, *args: Any, **kwargs: Any) -> Any:
        if self.reports_top_tokens and self.model.training:
            with top_tokens_asked(self) as engine:
                completion_ids, logprobs = super()._generate_single_turn(prompt_ids, *args, **kwargs)
            self.top_tokens = engine.reported
        else:
            completion_ids, logprobs = super()._generate_single_turn(prompt_ids, *args, **kwargs)
        if self.parts is not None and not self._program:
            empty = [i for i, ids in enumerate(completion_ids) if len(ids) == 0]
            self._empty_rows = [] if self.tools else empty
            for i in empty:  # the parent can't hold a completion without a token: a masked one stands in
                completion_ids[i] = [self.eos_token_ids[0]]
                if logprobs is not None:
                    logprobs[i] = [None]
        return completion_ids, logprobs

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        if self.parts is None or not self.model.training:
            return super()._generate_and_score_completions(inputs)
        self._window = None
        if self._program:
            made, self._context = run_program(self, self.parts, inputs)
            out = self._score_made(made)
            if self.teacher is not None:
                rows = made.mine(self.accelerator.process_index)
                contexts = made.teacher_contexts
                self.teacher.add_prompts(out, [contexts[i] if i < len(contexts) else [] for i in rows])
            batch = program_batch(self, made, out)
        else:
            out = super()._generate_and_score_completions(inputs)
            batch = generated_batch(self, inputs, out, self._empty_rows)
        prepared = prepare(self.parts, batch)
        for part in self.parts["quant"]:
            part.observe(prepared.batch)
        self._prepared = prepared.batch
        width = out["completion_ids"].shape[1]
        size = len(out["completion_ids"])
        rank = self.accelerator.process_index
        mine = slice(rank * size, (rank + 1) * size)
        keys, self._values = own_rows(prepared.batch, size * self.accelerator.num_processes, mine, width)
        out |= keys
        out["advantages"] = out[f"{PREFIX}advantages"]
        self._log_prepared(prepared.batch, prepared.metrics, size * self.accelerator.num_processes)
        return out

    def _score_made(self, made: Rollouts) -> dict[str, Any]:
        """The parent's masks, log-probs, logs for rows that the program has generated and scored."""
        rows = made.mine(self.accelerator.process_index)
        keys = [made.batch.prompt_key[row if row < made.batch.size else 0] for row in rows]
        inputs = [dict(self.dataset_row(key)) for key in keys]
        self._made, before = made, self.rollout_func
        self.rollout_func = lambda prompts, trainer: as_rollout_func_output(trainer, made, rows)
        try:
            out = super()._generate_and_score_completions(inputs)
        finally:
            self._made, self.rollout_func = None, before
        if made.batch.size < made.per_rank * self.accelerator.num_processes:
            self._log_lengths(made.batch)
        return out

    def _log_lengths(self, batch: RolloutBatch) -> None:
        """The parent's statistics of completions again, without the padding rows."""
        lengths, finished = batch.response_mask.sum(1).float(), batch.finished
        ended = lengths[finished] if bool(finished.any()) else lengths.new_zeros(1)
        values = {"clipped_ratio": 1 - finished.float().mean()}
        for name, kind in (("length", lengths), ("terminated_length", ended)):
            values |= {f"mean_{name}": kind.mean(), f"min_{name}": kind.min(), f"max_{name}": kind.max()}
        for name, value in values.items():
            self._metrics["train"][f"completions/{name}"][-1] = float(value)

    def _extra_logs(self, made: Rollouts) -> dict[str, list[Any]]:
        rows = made.mine(self.accelerator.process_index)
        logged = [row or {} for row in made.logged]
        names = sorted({name for row in logged for name in row})
        return {n: [logged[i].get(n) if i < len(logged) else None for i in rows] for n in names}

    def _log_prepared(self, batch: RolloutBatch, metrics: Mapping[str, float], total: int) -> None:
        metrics = {**metrics, **(self._context.metrics if self._context is not None else {})}
        if self._program:
            metrics["rows"] = float(batch.size)
        for name, value in metrics.items():
            self._metrics["train"][f"rlx/{name}"].append(float(value))
        count = batch.response_mask.sum(1).clamp(min=1)
        mean = batch.advantages.new_zeros(total)
        mean[batch.row] = batch.advantages.sum(1) / count
        logged = self._logs["advantages"]
        for _ in range(min(len(logged), total)):
            logged.pop()
        logged.extend(mean.tolist())

    # ---- loss
    def _get_per_token_logps_and_entropies(
        self, model: Any, input_ids: Any, attention_mask: Any, logits_to_keep: Any, *args: Any, **kwargs: Any
    ) -> Any:
        if self.parts is None or not self._capturing:
            return super()._get_per_token_logps_and_entropies(
                model, input_ids, attention_mask, logits_to_keep, *args, **kwargs
            )
        with torch.enable_grad():
            if self._needs_logits:
                self._live = self._from_logits(model, input_ids, attention_mask, logits_to_keep, **kwargs)
            else:
                self._live = super()._get_per_token_logps_and_entropies(
                    model, input_ids, attention_mask, logits_to_keep, *args, **kwargs
                )
        return self._live

    def _from_logits(
        self, model: Any, input_ids: Tensor, attention_mask: Tensor, logits_to_keep: int, **kwargs: Any
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """The parent's result from full logits, which stay at hand for the parts that read them."""
        extra = {k: v for k, v in kwargs.items() if v is not None and k in _MODEL_INPUTS}
        if kwargs.get("compute_aux_loss"):
            extra["output_router_logits"] = True
        with self.accelerator.autocast():
            output = model(
                input_ids=input_ids, attention_mask=attention_mask, logits_to_keep=logits_to_keep + 1, **extra
            )
        self._logits = output.logits[:, -logits_to_keep - 1 : -1].float() / self.temperature
        logp = self._logits.log_softmax(-1)
        chosen = logp.gather(-1, input_ids[:, -logits_to_keep:, None])[..., 0]
        entropy = -(logp.exp() * logp).sum(-1)
        return chosen, entropy, output.aux_loss if kwargs.get("compute_aux_loss") else None

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        if self.parts is None or not self.model.training:
            return super()._compute_loss(model, inputs)
        parts, window = self.parts, self.current_gradient_accumulation_steps
        if f"{PREFIX}kept_length" in inputs:
            inputs = cut_responses(inputs, max(1, int(inputs[f"{PREFIX}kept_length"].max())))
        if self._window is None:
            first, n = self._step, self.args.steps_per_generation
            chunks = [self._buffered_inputs[(first + i) % n] for i in range(window)]
            self._window = window_totals(chunks, self._counts, self._sum_over_ranks, self.accelerator.num_processes)
        totals = with_micro_scope(self._window, self._micro_terms, inputs, self._counts, window)
        if self.accelerator.sync_gradients:
            self._window = None
        entropy_coef = self._current_entropy_coef()
        logp_new, entropy, aux_loss = self._forward_and_parent_metrics(model, inputs)
        assert self._prepared is not None
        batch = micro_batch(inputs, self._values, self._prepared)
        if not batch.has("logp_old"):
            old = inputs.get(LOG_PROBS["logp_old"])
            batch = batch.with_columns(logp_old=logp_new.detach() if old is None else old)
        refuse_nan(logp_new, batch, self.state.global_step, self._sum_over_ranks)
        trl_correction = inputs.get("importance_sampling_ratio")
        weighted = batch
        if trl_correction is not None:
            weighted = batch.with_columns(loss_weight=batch.loss_weight * trl_correction)
        loss, metrics = policy_loss(
            parts,
            weighted,
            logp_new,
            totals=totals,
            entropy=entropy,
            logits=self._logit_columns(inputs, batch) if self._needs_logits else None,
            all_reduce=self._sum_over_ranks,
        )
        loss = loss + host_terms(
            batch,
            logp_new,
            entropy,
            totals,
            beta=self.beta,
            bias_correction=self.args.use_bias_correction_kl,
            entropy_coef=entropy_coef,
        )
        if self.aux_loss_enabled:
            loss = loss + self.router_aux_loss_coef * aux_loss / window
        self._log_loss(metrics)
        return loss

    _logits: Tensor | None = None

    def _logit_columns(self, inputs: Mapping[str, Any], batch: RolloutBatch) -> dict[str, Tensor]:
        """What the parts' `from_logits` make of the policy's logits, and the teacher's where one is wanted."""
        assert self.parts is not None and self._logits is not None
        logits, self._logits = self._logits, None
        columns = batch.token_columns()
        if self.teacher is not None and self._needs_teacher_logits:
            columns["teacher_logits"] = self.teacher.logits(inputs)
        out: dict[str, Tensor] = {}
        for part in self.parts.with_hook("from_logits"):
            out |= part.from_logits(logits, columns)
        return out

    def _forward_and_parent_metrics(self, model: Any, inputs: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor | None]:
        """Live log-probs and entropies of the micro-batch, from inside the parent's loss, which only logs."""
        self._capturing = True
        try:
            with torch.no_grad():
                super()._compute_loss(model, inputs)
        finally:
            self._capturing = False
        assert self._live is not None
        live, self._live = self._live, None
        return live

    def _current_entropy_coef(self) -> float:
        if not self._entropy_bonus_enabled:
            return 0.0
        if self.use_adaptive_entropy and self._last_world_entropy > self.args.entropy_target:
            return 0.0
        return self.entropy_coef

    def _sum_over_ranks(self, x: Tensor) -> Tensor:
        return self.accelerator.reduce(x.detach(), reduction="sum")

    def _log_loss(self, metrics: Mapping[str, Tensor]) -> None:
        if not metrics:
            return
        names = sorted(metrics)
        values = torch.stack([metrics[name].detach().float() for name in names])
        for name, value in zip(names, self.accelerator.reduce(values, reduction="mean").tolist()):
            self._metrics["train"][f"rlx/{name}"].append(value)

    # ---- after the update, checkpoints
    def _optimizer_stepped(self) -> None:
        """After an optimizer step: move the averaged policy; after a generation batch's last, tell the rollout side."""
        assert self.parts is not None
        last = self._prepared is not None and self._step % (self.args.steps_per_generation * self.num_iterations) == 0
        if self.averaged is not None:
            asked = any(getattr(part, "reset_proximal", False) for part in self.parts["correction"])
            self.averaged.stepped(reset=last and asked)
        if not last:
            return
        if self._context is not None and self.accelerator.is_main_process:
            for part in self.parts.rollout:
                part.feedback(self._prepared, self._context)
        self._prepared = None

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        """As the parent's; `resume_from_checkpoint=True` takes the newest checkpoint that was written to its end."""
        if self.parts is not None and resume_from_checkpoint is True:
            resume_from_checkpoint = latest(self.args.output_dir) or True
        return super().train(resume_from_checkpoint, *args, **kwargs)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        if self.parts is not None and self.args.should_save:
            folder = f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
            path = os.path.join(self._get_output_dir(trial=trial), folder)
            save_parts(self.parts, path)
            if self.averaged is not None:
                self.averaged.save(path)
        super()._save_checkpoint(model, trial)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if self.parts is None or checkpoint is None:
            return
        load_parts(self.parts, checkpoint)
        if self.averaged is not None:
            self.averaged.load(checkpoint)
        sampler = self._train_sampler
        if sampler is not None and sampler.shuffle:  # the parent starts the order of the first epoch again
            for _ in range(int(self.state.epoch or 0)):
                torch.randperm(sampler.num_samples, generator=sampler.generator)

    _train_sampler: Any = None

    def _get_train_sampler(self, dataset: Any = None) -> Any:
        self._train_sampler = super()._get_train_sampler(dataset)
        return self._train_sampler


_MODEL_INPUTS = (
    "pixel_values image_grid_thw pixel_attention_mask image_sizes token_type_ids mm_token_type_ids image_position_ids"
).split()


def checked_parts(args: Any, dataset: Any, *, own_rollouts: bool) -> Parts:
    """The plug-ins of `args`; ConfigError where they, the other arguments and the dataset do not fit together."""
    parts = build(args.plugins, host_profile(args, dataset=dataset, own_rollouts=own_rollouts))
    check_options(args, parts, own_rollouts=own_rollouts, dataset=dataset)
    check_saving(args, args.save_steps)
    return parts


class _StepEnd(TrainerCallback):
    """Tells the trainer when the updates of a generation batch are done, before a checkpoint is written."""

    def __init__(self, trainer: RLXTrainer):
        self.trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        check_saving(args, state.save_steps)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.trainer._optimizer_stepped()
