"""What a recipe trains on: datasets, the rewards they can be scored with, and a held-out measure."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..core.errors import ConfigError, close_matches
from . import data_task
from .data_task import DataTask

TINY_TASKS: dict[str, str | None] = {
    "tiny": None,
    "tiny-few": None,
    "tiny-engine": "rlx_plugins.testing.tiny_engine:fp8_engine",
    "tiny-mixed": "rlx_plugins.testing.tiny_engine:mixed_sources",
    "tiny-agent": "rlx_plugins.testing.tiny_agent:stepwise_agent",
}
"""Tasks of rlx_plugins.testing -> the rollout code they bring along on host trl.

tiny         sums; the host generates
tiny-few     the same with 64 training prompts, so that epochs pass
tiny-engine  the same, sampled by an engine of its own that reports log-probs (trl: the policy with weights in FP8;
             verl: its rollout server)
tiny-mixed   the same, with a reference solution among each prompt's rollouts (trl only)
tiny-agent   the same, term by term in several turns (trl only)
"""

TINY_REWARDS = ("accuracy", "format", "brevity")


def is_tiny(task: str | DataTask) -> bool:
    """Whether it is one of our tiny tasks."""
    return isinstance(task, str) and task in TINY_TASKS


@dataclass
class Task:
    """A task by name.

    train, eval  datasets in the host's own format (TRL: a `prompt` column and whatever the rewards read)
    rewards      reward functions by the name a recipe uses
    evaluate     (model, tokenizer) -> held-out accuracy in [0, 1], or None
    rollout_func  rollout code in TRL's form, in the place of the host's own generation
    """

    train: Any
    eval: Any = None
    rewards: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    evaluate: Callable[[Any, Any], float] | None = None
    rollout_func: Callable[..., Any] | None = None

    def reward(self, name: str) -> Callable[..., Any]:
        """A reward of the task by name, or any function by "package.module:function"."""
        if name in self.rewards:
            return self.rewards[name]
        if ":" in name:
            return load_object(name, "reward")
        raise ConfigError(
            f"unknown reward {name!r}{close_matches(name, self.rewards)}"
            f" (this task has {', '.join(self.rewards) or 'none'}; your own: package.module:function)"
        )


def reward_names(task: str | DataTask) -> tuple[str, ...] | None:
    """Names of the rewards a task brings along; None where only its function can tell."""
    if isinstance(task, DataTask):
        return data_task.REWARDS
    return TINY_REWARDS if is_tiny(task) else None


def load_task(task: str | DataTask, seed: int) -> Task:
    """A tiny task, a dataset, or what "package.module:function" returns (a `Task`, or a mapping with its fields)."""
    if isinstance(task, DataTask):
        from .answers import accuracy_reward, format_reward

        return Task(train=task.rows(task.split), rewards={"accuracy": accuracy_reward, "format": format_reward})
    if is_tiny(task):
        return _tiny_task(task, seed)
    check_task(task)
    made = load_object(task, "task")()
    if isinstance(made, Task):
        return made
    if isinstance(made, Mapping) and "train" in made and set(made) <= set(Task.__dataclass_fields__):
        return Task(**made)
    fields = ", ".join(Task.__dataclass_fields__)
    raise ConfigError(f"task {task}: expected a Task or a mapping with {fields}; got {made!r:.100}")


def check_task(task: str | DataTask) -> None:
    """Refuse a name that is neither a tiny task nor a function."""
    if isinstance(task, str) and task not in TINY_TASKS and ":" not in task:
        accepted = f"{', '.join(TINY_TASKS)}, package.module:function of your own, or a mapping with a dataset"
        raise ConfigError(f"unknown task {task!r}{close_matches(task, TINY_TASKS)} (accepted: {accepted})")


def train_size(name: str) -> int:
    """Training prompts of a tiny task."""
    return 64 if name == "tiny-few" else 2000


def _tiny_task(name: str, seed: int) -> Task:
    from ..testing.tiny_tasks import accuracy_reward, brevity_reward, format_reward, greedy_accuracy, tiny_dataset

    held_out = tiny_dataset("eval", size=400)
    rollouts = TINY_TASKS[name]
    return Task(
        train=tiny_dataset("train", size=train_size(name), seed=seed),
        eval=held_out,
        rewards=dict(zip(TINY_REWARDS, (accuracy_reward, format_reward, brevity_reward), strict=True)),
        evaluate=lambda model, tokenizer: greedy_accuracy(model, tokenizer, held_out),
        rollout_func=load_object(rollouts, "rollout code") if rollouts is not None else None,
    )


def load_model_path(name: str) -> str:
    """The folder or hub name to load: `tiny` and `smollm` are built (or taken from the cache) first."""
    if name == "tiny":
        from ..testing.tiny_model import tiny_model_path

        return str(tiny_model_path())
    if name == "smollm":
        from ..testing.smollm import smollm_path

        return str(smollm_path())
    return name


def load_object(path: str, what: str) -> Any:
    """The object "package.module:name"; ConfigError says which half is wrong."""
    module, _, name = path.partition(":")
    try:
        found = importlib.import_module(module)
    except ImportError as error:
        remedy = ""
        if isinstance(error, ModuleNotFoundError) and f"{module}.".startswith(f"{error.name}."):
            remedy = "; install its package, or put the folder it is in on PYTHONPATH"
        raise ConfigError(f"{what} {path!r}: the module {module!r} can't be imported: {error}{remedy}") from error
    if not hasattr(found, name):
        raise ConfigError(f"{what} {path!r}: {module} has no {name!r}{close_matches(name, dir(found))}")
    return getattr(found, name)
