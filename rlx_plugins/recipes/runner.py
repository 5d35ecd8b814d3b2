"""Run a recipe on its host, in a folder of its own."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from .. import __version__
from ..core.errors import ConfigError
from .curves import plot
from .provenance import provenance
from .run_folder import RunFolder, is_main_process, read_json, summarise, write_json
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
    seconds of training. Under a launcher with several processes only the main one writes.
    """
    recipe = recipe.in_profile(profile)
    chosen = recipe.profile(profile)
    setting = {
        "recipe": recipe.model_dump(mode="json"),
        "profile": profile,
        "seed": seed,
        "rlx_plugins": __version__,
        **provenance(recipe.host),
    }
    train = host_module(recipe.host).train
    options = {"tiny": profile == "tiny"} if recipe.host == "verl" else {}
    if is_main_process():
        if resume and folder.holds_run():
            check_same_run(folder, setting)
        folder.failure.unlink(missing_ok=True)
        write_json(folder.recipe, setting)
    try:
        accuracy = train(recipe, chosen, folder, seed=seed, resume=resume, progress=progress, **options)
    except BaseException as error:
        if is_main_process():
            write_json(folder.failure, {"error": f"{type(error).__name__}: {error}"})
        raise
    records = folder.records()
    summary = {**summarise(records), **accuracy}
    if is_main_process():
        write_json(folder.summary, summary)
        plot({recipe.name: records}, folder.curves, title=recipe.title)
    return summary


def check_same_run(folder: RunFolder, setting: Mapping[str, Any]) -> None:
    """Refuse to go on with a run that was started with another recipe, host, profile or seed."""
    saved, now = (_what_trains(s) for s in (read_json(folder.recipe), setting))
    if found := list(_differences(saved, now)):
        raise ConfigError(
            f"{folder.path} holds a run that was started otherwise, and --resume goes on with the same one:"
            f" {'; '.join(found)}; start another with --output, or replace it with --overwrite"
        )


def _what_trains(setting: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a run's setting that decides how it trains, without texts and without where verl's Ray is."""
    recipe, profile = setting["recipe"], setting["profile"]
    chosen = {name: value for name, value in recipe["profiles"][profile].items() if name not in ("plugins", "notes")}
    given = chosen["arguments"]
    chosen["arguments"] = {key: given[key] for key in given if not key.lstrip("+").startswith("ray_kwargs")}
    keys = ("name", "host", "plugins")
    return {"profile": profile, "seed": setting["seed"], **{key: recipe[key] for key in keys}, **chosen}


def _differences(saved: Any, now: Any, where: str = "") -> Iterator[str]:
    if isinstance(saved, Mapping) and isinstance(now, Mapping):
        for key in dict.fromkeys([*saved, *now]):
            yield from _differences(saved.get(key), now.get(key), f"{where}.{key}" if where else str(key))
    elif saved != now:
        yield f"{where} was {saved!r}, now {now!r}"


def command_text(
    recipe: Recipe, folder: RunFolder, *, profile: str = "tiny", seed: int = 0, resume: bool = False
) -> str:
    """The shell command that `run` would start on a host that is started by one."""
    recipe = recipe.in_profile(profile)
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
