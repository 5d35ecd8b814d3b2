"""Train a recipe with TRL: model, task and arguments of a profile become an RLXTrainer run in a folder."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback, TrainerCallback, set_seed
from transformers.trainer_utils import get_last_checkpoint

from ...core.errors import ConfigError, close_matches
from ...recipes.run_folder import RunFolder
from ...recipes.schema import Profile, Recipe
from ...recipes.task import load_model_path, load_task
from .checkpoint import latest
from .config import RLXConfig
from .trainer import RLXTrainer

Progress = Callable[[Mapping[str, Any]], None]


def train(
    recipe: Recipe,
    profile: Profile,
    folder: RunFolder,
    *,
    seed: int = 0,
    resume: bool = False,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Run the training; metrics go to the folder step by step. Returns held-out accuracy before and after."""
    config = make_config(recipe, profile, folder, seed)
    task = load_task(profile.task, seed)
    counter = TokenCounter()
    rewards = [task.reward(name) for name in profile.rewards]
    rewards[0] = counter.watch(rewards[0])
    set_seed(seed)
    path = load_model_path(profile.model)
    tokenizer = AutoTokenizer.from_pretrained(path)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32 if config.use_cpu else None)
    trainer = RLXTrainer(
        model=model,
        reward_funcs=rewards,
        args=config,
        train_dataset=task.train,
        processing_class=tokenizer,
    )
    checkpoint = None
    if resume and folder.checkpoints.is_dir():
        newest = latest if recipe.plugins else get_last_checkpoint
        checkpoint = newest(str(folder.checkpoints))
    if checkpoint is not None:
        counter.resume(folder, step=int(checkpoint.rsplit("-", 1)[1]))
    accuracy: dict[str, Any] = {}
    if task.evaluate is not None:
        accuracy["accuracy_before"] = task.evaluate(trainer.model, tokenizer)
        set_seed(seed)
    trainer.remove_callback(PrinterCallback)
    trainer.add_callback(MetricsLog(folder, counter, progress))
    trainer.train(resume_from_checkpoint=checkpoint)
    if task.evaluate is not None:
        accuracy["accuracy_after"] = task.evaluate(trainer.model, tokenizer)
    return accuracy


def make_config(recipe: Recipe, profile: Profile, folder: RunFolder, seed: int) -> RLXConfig:
    """The profile's arguments as an RLXConfig; an argument TRL does not have is refused by name."""
    arguments = {**profile.arguments}
    if profile.task == "tiny":
        from ...testing.tiny_tasks import tiny_grpo_args

        arguments = tiny_grpo_args(**arguments)
    if profile.weights is not None:
        arguments["reward_weights"] = profile.weights
    known = RLXConfig.__dataclass_fields__
    for name in arguments:
        if name not in known or name == "plugins":
            raise ConfigError(f"recipe {recipe.name}: TRL has no argument {name!r}{close_matches(name, known)}")
    fixed = {"output_dir": str(folder.checkpoints), "seed": seed, "logging_steps": 1}
    fixed |= {"report_to": "none", "disable_tqdm": True}  # the folder and the caller's progress take their place
    try:
        return RLXConfig(**{**arguments, **fixed, "plugins": recipe.plugins or None})
    except (ValueError, TypeError) as error:
        raise ConfigError(f"recipe {recipe.name}: TRL refuses the arguments: {error}") from error


class TokenCounter:
    """Counts generated tokens: every completion that is scored passes a reward function once."""

    def __init__(self) -> None:
        self.tokens = 0
        self.seconds_before = 0.0

    def watch(self, reward: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(reward)
        def counted(*args: Any, completion_ids: Any = (), **kwargs: Any) -> Any:
            self.tokens += sum(map(len, completion_ids))
            return reward(*args, completion_ids=completion_ids, **kwargs)

        return counted

    def resume(self, folder: RunFolder, step: int) -> None:
        """Go on counting from what an interrupted run had counted when it wrote the checkpoint of `step`."""
        last = next((r for r in reversed(folder.records()) if r["step"] <= step), {})
        self.tokens = last.get("generated_tokens") or 0
        self.seconds_before = last.get("seconds") or 0.0


class MetricsLog(TrainerCallback):
    """Writes TRL's own log, step by step, to the run's folder."""

    def __init__(self, folder: RunFolder, counter: TokenCounter, progress: Progress | None):
        self.folder, self.counter, self.progress = folder, counter, progress
        self.started = time.monotonic()

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.started = time.monotonic()

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        if not state.is_world_process_zero or not logs or "reward" not in logs:
            return
        record = {
            "step": state.global_step,
            "max_steps": state.max_steps,
            "reward": logs["reward"],
            "completion_length": logs.get("completions/mean_length"),
            "generated_tokens": self.counter.tokens,
            "seconds": round(self.counter.seconds_before + time.monotonic() - self.started, 3),
            **{k: v for k, v in logs.items() if isinstance(v, (int, float)) and k != "reward"},
        }
        self.folder.log(record)
        if self.progress is not None:
            self.progress(record)
