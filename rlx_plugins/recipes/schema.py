"""What a recipe may say, checked with the line of the mistake.

name: quickstart
title: DVAO advantages with BAPO's clip bounds
papers: ["DVAO ..., arXiv 2605.25604"]
host: trl
plugins: {advantage: dvao, clip: bapo}
profiles:
  tiny:
    model: tiny
    task: tiny
    rewards: [accuracy, format]
    arguments: {max_steps: 150}
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ..core.config import OPTIONS, check_key, expand, merge_override, read_value, specs
from ..core.errors import ConfigError, close_matches
from ..core.kinds import ALIASES, KINDS
from ..core.registry import create


class Profile(BaseModel):
    """One setting of a recipe: what is trained, on what, with which of the host's own arguments.

    model      a path or hub name; `tiny` and `smollm` are built by rlx_plugins.testing
    task       `tiny`, or "package.module:function" of a function that returns {"train": Dataset, "eval": Dataset}
               (host verl: paths of parquet files in verl's format)
    rewards    names of the task's reward functions, or "package.module:function" of your own; they are summed
               (host verl: one function of your own, in verl's form)
    weights    one weight per reward (default: 1 each)
    arguments  the host's own arguments, passed through unchanged (host verl: Hydra overrides, nested or dotted)
    notes      where the setting comes from
    """

    model_config = ConfigDict(extra="forbid")

    model: str = "tiny"
    task: str = "tiny"
    rewards: list[str] = Field(default_factory=lambda: ["accuracy"], min_length=1)
    weights: list[float] | None = None
    arguments: dict[str, Any] = Field(default_factory=dict)
    notes: str = ""


class Recipe(BaseModel):
    """A recipe file. `plugins` has the grammar of core/config.py; no plug-in at all is the host as it is."""

    model_config = ConfigDict(extra="forbid")

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9_-]*$")
    title: str
    papers: list[str] = Field(default_factory=list)
    host: Literal["trl", "verl"]
    plugins: dict[str, Any] = Field(default_factory=dict)
    profiles: dict[Literal["tiny", "paper"], Profile]

    def profile(self, name: str) -> Profile:
        """A profile by name; ConfigError when the recipe has none of that name."""
        if name not in self.profiles:
            raise ConfigError(f"recipe {self.name} has no profile {name!r} (it has {', '.join(self.profiles)})")
        return self.profiles[name]  # type: ignore[index]


class RecipeError(ConfigError):
    """A mistake in a recipe file: where it is and what is accepted there."""


def load(path: str | Path) -> Recipe:
    """Read and check a recipe: keys and types, every plug-in's name and parameters. No host is imported."""
    path = Path(path)
    try:
        text = path.read_text()
    except FileNotFoundError:
        raise RecipeError(f"{path}: no such file{_similar_files(path)}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(f"{path}: cannot be read: {error}") from None
    try:
        data = yaml.safe_load(text)
        lines = _key_lines(yaml.compose(text))
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{path}:{mark.line + 1}" if mark else str(path)
        raise RecipeError(f"{where}: not YAML: {getattr(error, 'problem', error)}") from None
    if not isinstance(data, dict):
        raise RecipeError(f"{path}: a recipe is a mapping with the keys {', '.join(Recipe.model_fields)}")
    try:
        recipe = Recipe.model_validate(data)
    except ValidationError as error:
        raise RecipeError("\n".join(_explain(path, lines, e) for e in error.errors())) from None
    try:
        check_plugins(recipe.plugins)
    except ConfigError as error:
        raise RecipeError(f"{path}:{_line_of_plugin(lines, str(error))}: {error}") from None
    for name, profile in recipe.profiles.items():
        if profile.weights is not None and len(profile.weights) != len(profile.rewards):
            line = lines.get(("profiles", name, "weights"), 1)
            counts = f"{len(profile.weights)} weights for {len(profile.rewards)} rewards"
            raise RecipeError(f"{path}:{line}: profiles.{name}.weights: {counts}")
    return recipe


def check_plugins(plugins: dict[str, Any]) -> None:
    """Check the names and parameters of a `plugins` mapping; what a host must supply is checked when it runs."""
    for key, value in {**plugins, **expand(plugins)}.items():
        check_key(key)
        if key in OPTIONS or value is None:
            continue
        for spec in specs(key, value):
            parameters = dict(spec)
            create(ALIASES.get(key, key), parameters.pop("name"), **parameters)


def with_overrides(recipe: Recipe, words: Sequence[str], profile: str) -> Recipe:
    """The recipe with `key=value` words applied: a kind names or sets a plug-in, anything else is the host's argument.

    `clip=bapo clip.target=1.0 learning_rate=1e-4 model=smollm rewards=[accuracy] plugins=none`
    """
    plugins = copy.deepcopy(recipe.plugins)
    chosen = recipe.profile(profile).model_copy(deep=True)
    for word in words:
        key, sign, text = word.partition("=")
        if not sign or not key:
            raise ConfigError(f"expected key=value, got {word!r}")
        value = read_value(text)
        head = key.split(".")[0]
        if head in KINDS or head in ALIASES or head in OPTIONS:
            if value is None and "." not in key:
                plugins.pop(key, None)
            else:
                merge_override(plugins, key, value)
        elif key == "plugins":
            if value is not None:
                raise ConfigError("plugins=none removes every plug-in; name kinds one by one otherwise: clip=bapo")
            plugins = {}
        elif key in Profile.model_fields and key != "arguments":
            try:
                chosen = Profile.model_validate({**chosen.model_dump(), key: value})
            except ValidationError as error:
                raise ConfigError(f"{word}: {error.errors()[0]['msg']}") from None
        else:
            chosen.arguments[key.removeprefix("arguments.")] = value
    check_plugins(plugins)
    return recipe.model_copy(update={"plugins": plugins, "profiles": {**recipe.profiles, profile: chosen}})


Lines = dict[tuple[str | int, ...], int]


def _key_lines(node: yaml.Node | None, path: tuple[str | int, ...] = ()) -> Lines:
    """Line (from 1) of every key and list entry of a YAML document, by its path."""
    lines: Lines = {}
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            here = (*path, key.value)
            lines[here] = key.start_mark.line + 1
            lines |= _key_lines(value, here)
    elif isinstance(node, yaml.SequenceNode):
        for i, value in enumerate(node.value):
            lines[(*path, i)] = value.start_mark.line + 1
            lines |= _key_lines(value, (*path, i))
    return lines


def _explain(path: Path, lines: Lines, error: Any) -> str:
    where = tuple(p for p in error["loc"] if p != "[key]")
    line = next((lines[where[:n]] for n in range(len(where), 0, -1) if where[:n] in lines), 1)
    name = ".".join(map(str, where))
    if error["type"] == "extra_forbidden":
        known = (Profile if where[0] == "profiles" else Recipe).model_fields
        near = close_matches(str(where[-1]), known)
        return f"{path}:{line}: unknown key {name!r}{near} (accepted: {', '.join(known)})"
    if error["type"] == "missing":
        return f"{path}:{line}: the key {name!r} is missing"
    return f"{path}:{line}: {name}: {error['msg']}, got {error['input']!r}"


def _line_of_plugin(lines: Lines, message: str) -> int:
    """Best line for a plug-in's error: that of the kind the message begins with, else of `plugins`."""
    words = message.replace("unknown ", "").split()
    for key in (("plugins", word.strip("'\":;.")) for word in words):
        if key in lines:
            return lines[key]
    return lines.get(("plugins",), 1)


def _similar_files(path: Path) -> str:
    folder = path.parent if path.parent.is_dir() else Path()
    return close_matches(path.name, [p.name for p in folder.glob("*.yaml")])
