"""Train a recipe with TRL: model, task and arguments of a profile become an RLXTrainer run in a folder."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback, TrainerCallback, set_seed
from trl.models.utils import unwrap_model_for_generation

from ...core.errors import ConfigError, close_matches
from ...core.kinds import KINDS
from ...recipes.run_folder import RunFolder
from ...recipes.schema import Profile, Recipe
from ...recipes.task import is_tiny, load_model_path, load_task
from ..measures import weights_hash
from .checkpoint import latest
from .config import RLXConfig
from .measured import MeasuredTrainer, Spent, TokenBudget
from .profile import column_names
from .trainer import checked_parts

Progress = Callable[[Mapping[str, Any]], None]

PER_UPDATE = ("clip_ratio/", "rlx/clip/")
"""Metrics of the loss that differ from one optimizer step on a batch to the next."""


def train(
    recipe: Recipe,
    profile: Profile,
    folder: RunFolder,
    *,
    seed: int = 0,
    resume: bool = False,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Run the training; metrics go to the folder step by step.

    Returns held-out accuracy before and after, and a hash of the initial weights.
    """
    config = make_config(recipe, profile, folder, seed)
    task = load_task(profile.task, seed)
    columns = tuple(column_names(task.train))
    if columns and "prompt" not in columns:
        raise ConfigError(f"task {profile.task}: `train` has no column 'prompt' (it has {', '.join(columns)})")
    rewards = [task.reward(name) for name in profile.rewards]
    set_seed(seed)
    path = load_model_path(profile.model)
    tokenizer = loaded(AutoTokenizer, path)
    data = short_prompts(task.train, tokenizer, profile.max_prompt_length)
    if config.plugins:  # the trainer asks the same, but after the model is loaded
        checked_parts(config, data, own_rollouts=task.rollout_func is not None)
    model = loaded(AutoModelForCausalLM, path, dtype=torch.float32 if config.use_cpu else None)
    trainer = MeasuredTrainer(
        model=model,
        reward_funcs=rewards,
        args=config,
        train_dataset=data,
        processing_class=tokenizer,
        rollout_func=task.rollout_func,
    )
    checkpoint = None
    if resume and folder.checkpoints.is_dir():
        checkpoint = latest(str(folder.checkpoints), parts=bool(recipe.plugins))
    seconds = 0.0
    if checkpoint is not None:
        trainer.spent, seconds = spent_before(folder, step=int(checkpoint.rsplit("-", 1)[1]))
    with whole_model(trainer) as model:
        summary: dict[str, Any] = {"initial_weights": weights_hash(model)}
        if task.evaluate is not None:
            summary["accuracy_before"] = task.evaluate(model, tokenizer)
            set_seed(seed)
    trainer.remove_callback(PrinterCallback)
    trainer.add_callback(MetricsLog(folder, trainer, seconds, progress))
    if profile.max_generated_tokens is not None or profile.max_update_tokens is not None:
        budget = TokenBudget(trainer, generated=profile.max_generated_tokens, update=profile.max_update_tokens)
        trainer.add_callback(budget)
    trainer.train(resume_from_checkpoint=checkpoint)
    if task.evaluate is not None:
        with whole_model(trainer) as model:
            summary["accuracy_after"] = task.evaluate(model, tokenizer)
    return summary


def loaded(cls: Any, path: str, **options: Any) -> Any:
    """`cls.from_pretrained`; ConfigError where there is no such model, or none that can be loaded."""
    try:
        return cls.from_pretrained(path, **options)
    except OSError as error:
        reason = " ".join(str(error).split())
        raise ConfigError(
            f"model {path!r} can't be loaded: {reason} (a profile's `model` is a folder, a hub name, tiny or smollm)"
        ) from error


def whole_model(trainer: MeasuredTrainer) -> Any:
    """A context in which every rank has the whole model, of which it holds a part under ZeRO-3."""
    return unwrap_model_for_generation(trainer.model_wrapped, trainer.accelerator)


def make_config(recipe: Recipe, profile: Profile, folder: RunFolder, seed: int) -> RLXConfig:
    """The profile's arguments as an RLXConfig; an argument TRL does not have is refused by name."""
    arguments = setting_arguments(profile) | profile.arguments
    if is_tiny(profile.task):
        from ...testing.tiny_tasks import tiny_grpo_args

        arguments = tiny_grpo_args(**arguments)
    if profile.weights is not None:
        arguments["reward_weights"] = profile.weights
    known = RLXConfig.__dataclass_fields__
    for name in arguments:
        if name not in known or name == "plugins":
            near = close_matches(name, {*known, *KINDS, *Profile.model_fields})
            raise ConfigError(f"recipe {recipe.name}: TRL has no argument {name!r}{near}")
    fixed = {"output_dir": str(folder.checkpoints), "seed": seed, "logging_steps": 1}
    fixed |= {"report_to": "none", "disable_tqdm": True}  # the folder and the caller's progress take their place
    try:
        return RLXConfig(**{**arguments, **fixed, "plugins": recipe.plugins or None})
    except (ValueError, TypeError) as error:
        remedy = ""
        if not torch.cuda.is_available() and not arguments.get("use_cpu") and "use_cpu" in str(error):
            remedy = " (without a GPU: use_cpu=true)"
        raise ConfigError(f"recipe {recipe.name}: TRL refuses the arguments: {error}{remedy}") from error


def setting_arguments(profile: Profile) -> dict[str, Any]:
    """The profile's settings (recipes/settings.py) as TRL's arguments."""
    teacher = load_model_path(profile.teacher) if profile.teacher is not None else None
    same = {
        "num_iterations": profile.updates_per_batch,
        "num_generations": profile.group_size,
        "max_completion_length": profile.max_response_length,
        "learning_rate": profile.learning_rate,
        "temperature": profile.temperature,
        "beta": profile.kl_coef,
        "teacher_model": teacher,
        "value_model": profile.value_model,
        "prox_decay": profile.prox_decay,
        "generation_chunk": profile.generation_chunk,
        "rollout_signals": profile.rollout_signals,
    }
    arguments = {name: value for name, value in same.items() if value is not None}
    if profile.steps is not None:  # TRL counts optimizer steps
        arguments["max_steps"] = profile.steps * (profile.updates_per_batch or 1)
    if profile.prompts_per_step is not None:
        given = {**RLXConfig.__dataclass_fields__, **arguments, **profile.arguments}
        group = given["num_generations"]
        rows = profile.prompts_per_step * (group if isinstance(group, int) else group.default)
        arguments |= spread_rows(rows, profile)
    return arguments


def spread_rows(rows: int, profile: Profile) -> dict[str, int]:
    """TRL's batch sizes for one optimizer step over `rows` rollouts, on as many processes as the launcher started.

    A process takes per_device_train_batch_size rows at a time: the profile's, TRL's 8 or less, or all on a tiny task.
    """
    processes = int(os.environ.get("WORLD_SIZE", 1))
    own, rest = divmod(rows, processes)
    at_once = profile.arguments.get("per_device_train_batch_size")
    if at_once is None:
        default = RLXConfig.__dataclass_fields__["per_device_train_batch_size"].default
        at_once = own if is_tiny(profile.task) else math.gcd(own, default)
    if rest or own % at_once:
        raise ConfigError(
            f"prompts_per_step: {rows} rollouts of a step do not spread over {processes} processes that take {at_once}"
            " at a time; change per_device_train_batch_size, or the number of prompts or processes"
        )
    return {"per_device_train_batch_size": at_once, "gradient_accumulation_steps": own // at_once}


def short_prompts(data: Any, tokenizer: Any, limit: int | None) -> Any:
    """The training data without prompts of more than `limit` tokens."""
    if limit is None:
        return data

    def is_short(row: Mapping[str, Any]) -> bool:
        prompt = row["prompt"]
        if isinstance(prompt, str):
            return len(tokenizer(prompt)["input_ids"]) <= limit
        return len(tokenizer.apply_chat_template(prompt, add_generation_prompt=True)["input_ids"]) <= limit

    return data.filter(is_short)


def spent_before(folder: RunFolder, step: int) -> tuple[Spent, float]:
    """Tokens and seconds an interrupted run had counted when it wrote the checkpoint of `step`."""
    last = next((r for r in reversed(folder.records()) if r["step"] <= step), {})
    spent = Spent(
        generated=last.get("generated_tokens") or 0,
        update=last.get("update_tokens") or 0,
        rollout_seconds=last.get("rollout_seconds") or 0.0,
    )
    return spent, last.get("seconds") or 0.0


class MetricsLog(TrainerCallback):
    """Writes TRL's log to the run's folder, one record per generation batch, with what the run has spent and measured.

    A record is TRL's log of the batch's first optimizer step. Clip statistics are the mean over all of them: at the
    first the ratio is 1, and nothing is clipped.
    """

    def __init__(self, folder: RunFolder, trainer: MeasuredTrainer, seconds: float, progress: Progress | None):
        self.folder, self.trainer, self.seconds, self.progress = folder, trainer, seconds, progress
        self.started = time.monotonic()
        self.record: dict[str, Any] | None = None
        self.updates: list[dict[str, float]] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.started = time.monotonic()

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        if not state.is_world_process_zero or not logs:
            return
        if "reward" in logs:
            self._write()
            self.record = self._new_record(state, logs)
        if self.record is not None:
            self.updates.append({k: v for k, v in logs.items() if k.startswith(PER_UPDATE)})
        per_batch = args.steps_per_generation * args.num_iterations // args.gradient_accumulation_steps
        if state.global_step % max(1, per_batch) == 0 or control.should_save:
            self._write()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._write()

    def _new_record(self, state: Any, logs: dict[str, Any]) -> dict[str, Any]:
        return {
            "step": state.global_step,
            "max_steps": state.max_steps,
            "reward": logs["reward"],
            "completion_length": logs.get("completions/mean_length"),
            "generated_tokens": self.trainer.spent.generated,
            "update_tokens": self.trainer.spent.update,
            "seconds": round(self.seconds + time.monotonic() - self.started, 3),
            "rollout_seconds": round(self.trainer.spent.rollout_seconds, 3),
            **{k: v for k, v in logs.items() if isinstance(v, (int, float)) and k != "reward"},
            **{f"rlx/{k}": v for k, v in self.trainer.measured.items()},
        }

    def _write(self) -> None:
        """Write the record at hand, if any, before a checkpoint can follow it."""
        if self.record is None:
            return
        for name in self.updates[0]:
            values = [update[name] for update in self.updates if name in update]
            self.record[name] = sum(values) / len(values)
        self.folder.log(self.record)
        if self.progress is not None:
            self.progress(self.record)
        self.record, self.updates = None, []
