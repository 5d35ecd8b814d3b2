"""Whether a host can carry a recipe's plug-ins as a profile configures it, told without importing the host."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from ..core.config import OPTIONS, build, expand, specs
from ..core.errors import ConfigError
from ..core.host import HostProfile
from ..core.kinds import ALIASES
from ..core.registry import create
from .settings import flatten
from .task import TINY_TASKS, is_tiny

if TYPE_CHECKING:
    from .schema import Profile, Recipe

MADE_BY_HOST = frozenset(
    "logp_old logp_ref logp_prox logp_rollout logp_behavior logp_teacher entropy rollout values rollout_top_ids"
    " rollout_top_logp".split()
)
"""Signals only a host can make; the data of a task that is not ours may supply any other."""


def check_fit(recipe: Recipe, name: str) -> None:
    """ConfigError where plug-ins exclude each other, or need what the host, so configured, can't supply or do.

    Options that the host looks at itself when the run starts are not repeated here.
    """
    recipe = recipe.in_profile(name)
    if recipe.plugins:
        profile = recipe.profile(name)
        host = {"trl": _trl, "verl": _verl}[recipe.host](profile)
        if (columns := _columns(profile)) is None:
            host = replace(host, signals=host.signals | (_required(recipe.plugins) - MADE_BY_HOST))
            build(recipe.plugins, host)
            return
        for part in build(recipe.plugins, host):
            for column in sorted(frozenset(getattr(part, "token_columns", ())) - frozenset(columns)):
                raise ConfigError(
                    f"{part.kind} {part.name} reads the column {column!r} of the training data, which has"
                    f" {', '.join(columns)}; a task's columns: {{{column}: ...}} names one of the dataset's"
                )


def _required(plugins: Mapping[str, Any]) -> frozenset[str]:
    """Signals the plug-ins read, whoever makes them."""
    found: set[str] = set()
    for key, value in expand(plugins).items():
        for spec in specs(key, value) if key not in OPTIONS and value is not None else ():
            found |= create(ALIASES.get(key, key), spec.pop("name"), **spec).requires
    return frozenset(found)


def _columns(profile: Profile) -> tuple[str, ...] | None:
    """Columns of the training data; None where a function of the user's makes it."""
    if is_tiny(profile.task):
        from ..testing.tiny_tasks import COLUMNS

        return COLUMNS
    return None if isinstance(profile.task, str) else ("prompt", "answer", *profile.task.columns)


class _RowsByIndex(list):
    """Stands for a dataset: it has a length, rows by index and the names of its columns."""

    def __init__(self, column_names: tuple[str, ...]):
        super().__init__()
        self.column_names = column_names


class _Arguments(SimpleNamespace):
    """TRL's arguments: one that is not given is off."""

    def __getattr__(self, name: str) -> Any:
        return None


def _trl(profile: Profile) -> HostProfile:
    settings = {
        "beta": profile.kl_coef or 0.0,
        "teacher_model": profile.teacher,
        "value_model": profile.value_model,
        "prox_decay": profile.prox_decay,
        "generation_chunk": profile.generation_chunk,
        "rollout_signals": profile.rollout_signals,
    }
    own = is_tiny(profile.task) and TINY_TASKS[profile.task] is not None
    host_profile = importlib.import_module("rlx_plugins.hosts.trl.profile").host_profile
    data = _RowsByIndex(_columns(profile) or ())
    return host_profile(_Arguments(**settings | profile.arguments), dataset=data, own_rollouts=own)


class _Config(dict):
    """verl's configuration: a group or option that is not given is empty, which counts as off."""

    def __missing__(self, key: str) -> _Config:
        return _Config()


def _verl(profile: Profile) -> HostProfile:
    module = importlib.import_module("rlx_plugins.hosts.verl.profile")
    settings: dict[str, Any] = {
        "actor_rollout_ref.rollout.calculate_log_probs": True,  # verl's default
        "actor_rollout_ref.actor.use_kl_loss": bool(profile.kl_coef),
        "rlx.prox_decay": profile.prox_decay,
        "rlx.generation_chunk": profile.generation_chunk,
        "rlx.rollout_signals": profile.rollout_signals,
        "rlx.value_model": profile.value_model,
    }
    if profile.teacher is not None:
        settings |= {"distillation.enabled": True, "distillation.distillation_loss.loss_mode": "k1"}
    settings |= flatten(profile.arguments)
    config = _Config()
    for path, value in settings.items():
        *groups, last = path.lstrip("+").split(".")
        place = config
        for group in groups:
            place = place.setdefault(group, _Config())
        place[last] = value
    mode = settings.get("trainer.v1.trainer_mode", module.SYNC)
    return module.host_profile(config, mode, _columns(profile) or ())
