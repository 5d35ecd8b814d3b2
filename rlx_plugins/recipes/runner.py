"""Run a recipe on its host, in a folder of its own."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

from .. import __version__
from ..core.errors import ConfigError
from .curves import plot
from .run_folder import RunFolder, summarise, write_json
from .schema import Recipe

Progress = Callable[[Mapping[str, Any]], None]
"""Called with every line of metrics: step, max_steps, reward, ..."""


def run(
    recipe: Recipe,
    folder: RunFolder,
    *,
    profile: str = "tiny",
    seed: int = 0,
    resume: bool = False,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Train `recipe` and return its summary, which is also written to the folder with the curves.

    Summary: first and last mean reward, held-out accuracy before and after (where the task has one), generated tokens,
    seconds of training.
    """
    chosen = recipe.profile(profile)
    setting = {
        "recipe": recipe.model_dump(mode="json"),
        "profile": profile,
        "seed": seed,
        "rlx_plugins": __version__,
    }
    train = host_module(recipe.host).train
    options = {"tiny": profile == "tiny"} if recipe.host == "verl" else {}
    write_json(folder.recipe, setting)
    accuracy = train(recipe, chosen, folder, seed=seed, resume=resume, progress=progress, **options)
    records = folder.records()
    summary = {**summarise(records), **accuracy}
    write_json(folder.summary, summary)
    plot({recipe.name: records}, folder.curves, title=recipe.title)
    return summary


def command_text(
    recipe: Recipe, folder: RunFolder, *, profile: str = "tiny", seed: int = 0, resume: bool = False
) -> str:
    """The shell command that `run` would start on a host that is started by one."""
    if recipe.host != "verl":
        raise ConfigError(f"host {recipe.host} runs in this process: there is no command to print (host verl has one)")
    make_command = host_module("verl").make_command
    command = make_command(recipe, recipe.profile(profile), folder, seed=seed, resume=resume, tiny=profile == "tiny")
    return str(command.text())


def host_module(host: str) -> Any:
    """The module `hosts.<host>.run`; ConfigError says what to install where it can't be imported."""
    try:
        return importlib.import_module(f"..hosts.{host}.run", __package__)
    except ImportError as error:
        raise ConfigError(f"host {host} can't be imported: {error}; pip install 'rlx-plugins[{host}]'") from error
