"""What a run is given, made ready: a key for every prompt, and reward functions whose errors say which one failed."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import nn

from ...core.errors import DataError
from .profile import column_names

PROMPT_KEY = "prompt_key"
"""Dataset column that names a prompt across epochs, resumes and workers; its row number where there is none."""


def with_prompt_keys(dataset: Any) -> Any:
    """The dataset with a `prompt_key` column of strings: its own, or the row number."""
    if dataset is None:
        return None
    if PROMPT_KEY in column_names(dataset):
        kind = getattr((dataset.features or {}).get(PROMPT_KEY), "dtype", "string")
        text = kind in ("string", "large_string")
        return dataset if text else dataset.map(lambda row: {PROMPT_KEY: str(row[PROMPT_KEY])})
    if hasattr(dataset, "__len__"):
        return dataset.add_column(PROMPT_KEY, [str(i) for i in range(len(dataset))])
    return dataset.map(lambda row, i: {PROMPT_KEY: str(i)}, with_indices=True)


def unique_names(names: Sequence[str]) -> list[str]:
    """The names, told apart by a number where one occurs twice."""
    out: list[str] = []
    for name in names:
        number, unique = 2, name
        while unique in out:
            number, unique = number + 1, f"{name}_{number}"
        out.append(unique)
    return out


def named_in_errors(reward_funcs: Any) -> Any:
    """Reward functions (one or a list) that raise DataError with their name; models and paths as they are."""
    if isinstance(reward_funcs, list):
        return [named_in_errors(function) for function in reward_funcs]
    if reward_funcs is None or isinstance(reward_funcs, (str, nn.Module)):
        return reward_funcs
    return _wrapped(reward_funcs)


def _wrapped(function: Callable[..., Any]) -> Callable[..., Any]:
    inner = function
    while isinstance(inner, functools.partial):
        inner = inner.func
    name = getattr(inner, "__name__", type(inner).__name__)

    def failed(error: Exception) -> DataError:
        return DataError(f"reward function {name!r} raised {type(error).__name__}: {error}")

    async def call_async(*args: Any, **kwargs: Any) -> Any:
        try:
            rewards = await function(*args, **kwargs)
        except Exception as error:  # a reward function may raise anything
            raise failed(error) from error
        return _numbers(name, rewards, kwargs.get("completions"))

    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            rewards = function(*args, **kwargs)
        except Exception as error:
            raise failed(error) from error
        return _numbers(name, rewards, kwargs.get("completions"))

    is_async = inspect.iscoroutinefunction(inner) or inspect.iscoroutinefunction(type(inner).__call__)
    wrapped: Callable[..., Any] = call_async if is_async else call
    wrapped.__name__ = name
    return wrapped


def _numbers(name: str, rewards: Any, completions: Sequence[Any] | None) -> list[Any]:
    """The rewards as a list; DataError where they are none, one is no number, or their number is another."""
    wanted = "it returns a list with a number for every completion, or None where it can't score one"
    if isinstance(rewards, (str, Mapping)) or not isinstance(rewards, Iterable):
        raise DataError(f"reward function {name!r} returned {rewards!r:.60}; {wanted}")
    found = list(rewards)
    for i, value in enumerate(found):
        if isinstance(value, (str, Mapping, list, tuple)):
            raise DataError(f"reward function {name!r} returned {value!r:.60} for completion {i}; {wanted}")
    if completions is not None and len(found) != len(completions):
        raise DataError(f"reward function {name!r} returned {len(found)} rewards for {len(completions)} completions")
    return found
