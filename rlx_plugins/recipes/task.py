"""What a recipe trains on: datasets, the rewards they can be scored with, and a held-out measure."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..core.errors import ConfigError, close_matches


@dataclass
class Task:
    """A task by name.

    train, eval  datasets in the host's own format (TRL: a `prompt` column and whatever the rewards read)
    rewards      reward functions by the name a recipe uses
    evaluate     (model, tokenizer) -> held-out accuracy in [0, 1], or None
    """

    train: Any
    eval: Any = None
    rewards: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    evaluate: Callable[[Any, Any], float] | None = None

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


def load_task(name: str, seed: int) -> Task:
    """`tiny`, or the task "package.module:function" returns (a `Task`, or a mapping with its fields)."""
    if name == "tiny":
        return _tiny_task(seed)
    if ":" not in name:
        raise ConfigError(f"unknown task {name!r} (accepted: tiny, or package.module:function of your own)")
    made = load_object(name, "task")()
    if isinstance(made, Task):
        return made
    if isinstance(made, Mapping) and "train" in made and set(made) <= {"train", "eval", "rewards", "evaluate"}:
        return Task(**made)
    raise ConfigError(
        f"task {name}: expected a Task or a mapping with train, eval, rewards, evaluate; got {made!r:.100}"
    )


def _tiny_task(seed: int) -> Task:
    from ..testing.tiny_tasks import accuracy_reward, brevity_reward, format_reward, greedy_accuracy, tiny_dataset

    held_out = tiny_dataset("eval", size=400)
    return Task(
        train=tiny_dataset("train", size=2000, seed=seed),
        eval=held_out,
        rewards={"accuracy": accuracy_reward, "format": format_reward, "brevity": brevity_reward},
        evaluate=lambda model, tokenizer: greedy_accuracy(model, tokenizer, held_out),
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
        raise ConfigError(f"{what} {path!r}: the module {module!r} can't be imported: {error}") from error
    if not hasattr(found, name):
        raise ConfigError(f"{what} {path!r}: {module} has no {name!r}{close_matches(name, dir(found))}")
    return getattr(found, name)
