"""What a recipe may say, checked with the file and line of the mistake.

extends: base/math.yaml
name: bapo
title: Clip bounds that balance positive and negative tokens
papers: ["BAPO ..., arXiv 2510.18927"]
host: [trl, verl]
plugins: {advantage: grpo, clip: {name: bapo, target: 1.0}}
profiles:
  tiny: {model: tiny, task: tiny, steps: 40, prompts_per_step: 16, group_size: 8}
  paper: {model: Qwen/Qwen2.5-7B, task: {dataset: my/math, answer: solution}, learning_rate: 1.0e-6}
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, ValidationError

from ..core.config import OPTIONS, check_key, expand, merge_override, read_value, specs
from ..core.errors import ConfigError
from ..core.kinds import ALIASES, KINDS
from ..core.registry import create
from .data_task import DataTask
from .documents import Document, RecipeError, merged, read_document
from .fit import check_fit
from .settings import SAME, flatten

HOSTS = tuple(SAME)


class Profile(BaseModel):
    """One setting of a recipe: what is trained, on what, how, with which of the host's own arguments.

    model      a path or hub name; `tiny` and `smollm` are built by rlx_plugins.testing
    task       a tiny task (task.py); a dataset with its columns (data_task.py); or "package.module:function" of a
               function that returns {"train": Dataset, ...} (host verl: paths of parquet files in verl's format)
    rewards    names of the task's reward functions, or "package.module:function" of your own; they are summed
               (host verl: one function of your own, in verl's form)
    weights    one weight per reward (default: 1 each)
    plugins    changes of the recipe's plug-ins in this profile
    arguments  the host's own arguments, passed through unchanged; they win over the settings above them. Of a recipe
               for several hosts: by host, {trl: {...}, verl: {...}} (host verl: Hydra overrides, nested or dotted)
    notes      where the setting comes from

    settings.py says what the settings from `teacher` to `kl_coef` mean.
    """

    model_config = ConfigDict(extra="forbid")

    model: str = "tiny"
    task: str | DataTask = "tiny"
    rewards: list[str] = Field(default_factory=lambda: ["accuracy"], min_length=1)
    weights: list[float] | None = None
    teacher: str | None = None
    value_model: str | None = None
    steps: int | None = Field(None, ge=1)
    max_generated_tokens: int | None = Field(None, ge=1)
    max_update_tokens: int | None = Field(None, ge=1)
    prompts_per_step: int | None = Field(None, ge=1)
    group_size: int | None = Field(None, ge=1)
    updates_per_batch: int | None = Field(None, ge=1)
    max_prompt_length: int | None = Field(None, ge=1)
    max_response_length: int | None = Field(None, ge=1)
    prox_decay: float | None = Field(None, ge=0, lt=1)
    generation_chunk: int | None = Field(None, ge=1)
    rollout_signals: list[str] | None = None
    learning_rate: float | None = Field(None, gt=0)
    temperature: float | None = Field(None, gt=0)
    kl_coef: float | None = Field(None, ge=0)
    plugins: dict[str, Any] = Field(default_factory=dict)
    arguments: dict[str, Any] = Field(default_factory=dict)
    notes: str = ""


class Recipe(BaseModel):
    """A recipe file, for one of its hosts. `plugins` has the grammar of core/config.py; none is the host as it is.

    host   the host it was read for: the one `load` was asked for, else the first the file names
    hosts  all that the file names
    """

    model_config = ConfigDict(extra="forbid")

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9_-]*$")
    title: str
    papers: list[str] = Field(default_factory=list)
    host: Literal["trl", "verl"]
    plugins: dict[str, Any] = Field(default_factory=dict)
    profiles: dict[Literal["tiny", "paper"], Profile]

    _hosts: tuple[str, ...] = PrivateAttr(())

    @property
    def hosts(self) -> tuple[str, ...]:
        return self._hosts or (self.host,)

    def profile(self, name: str) -> Profile:
        """A profile by name; ConfigError when the recipe has none of that name."""
        if name not in self.profiles:
            raise ConfigError(f"recipe {self.name} has no profile {name!r} (it has {', '.join(self.profiles)})")
        return self.profiles[name]  # type: ignore[index]

    def in_profile(self, name: str) -> Recipe:
        """The recipe with the profile's changes of the plug-ins made."""
        chosen = self.profile(name)
        plugins = merged({"plugins": self.plugins}, {"plugins": chosen.plugins})["plugins"]
        profiles = {**self.profiles, name: chosen.model_copy(update={"plugins": {}})}
        return self.model_copy(update={"plugins": plugins, "profiles": profiles})


def load(path: str | Path, *, host: str | None = None) -> Recipe:
    """Read and check a recipe: keys and types, plug-ins and their parameters, whether its hosts can carry them.

    host   one of the recipe's hosts (default: the first). No host is imported. RecipeError lists every mistake.
    """
    from .checks import mistakes_in  # it knows the models above

    document = read_document(Path(path))
    if found := mistakes_in(document):
        raise RecipeError("\n".join(found))
    names = hosts_of(document)
    if host is not None and host not in names:
        raise ConfigError(f"{path}: the recipe is for host {' and '.join(names)}, not {host!r}")
    return for_host(document, host or names[0])


def hosts_of(document: Document) -> list[Any]:
    """The hosts a document names, as a list."""
    given = document.data.get("host")
    return given if isinstance(given, list) else [] if given is None else [given]


def arguments_of(document: Document) -> Iterator[tuple[tuple[str, str, str], dict[str, Any]]]:
    """Path and value of every `arguments` mapping."""
    profiles = document.data.get("profiles")
    for name, profile in (profiles if isinstance(profiles, dict) else {}).items():
        if isinstance(profile, dict) and isinstance(profile.get("arguments"), dict):
            yield ("profiles", name, "arguments"), profile["arguments"]


def for_host(document: Document, host: str) -> Recipe:
    """The recipe of a document without mistakes of form, with the arguments of one host."""
    data = copy.deepcopy(document.data) | {"host": host}
    for (_, name, _), given in arguments_of(document):
        if any(key in HOSTS for key in given):
            data["profiles"][name]["arguments"] = given.get(host) or {}
    recipe = Recipe.model_validate(data)
    recipe._hosts = tuple(hosts_of(document))
    return recipe


def check_plugins(plugins: Mapping[str, Any]) -> None:
    """Check the names and parameters of a `plugins` mapping; what a host must supply is fit.py's."""
    for key, value in {**plugins, **expand(plugins)}.items():
        check_key(key)
        if key in OPTIONS or value is None:
            continue
        for spec in specs(key, value):
            parameters = dict(spec)
            create(ALIASES.get(key, key), parameters.pop("name"), **parameters)


def with_overrides(recipe: Recipe, words: Sequence[str], profile: str) -> Recipe:
    """The recipe in a profile, with `key=value` words applied.

    A kind names or sets a plug-in, a field of `Profile` sets that, anything else is the host's argument:
    `clip=bapo clip.target=1.0 learning_rate=1e-4 model=smollm rewards=[accuracy] plugins=none`
    """
    recipe = recipe.in_profile(profile)
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
            chosen = _with_setting(chosen, recipe.host, word, key, value)
        else:
            chosen.arguments[key.removeprefix("arguments.")] = value
    check_plugins(plugins)
    out = recipe.model_copy(update={"plugins": plugins, "profiles": {**recipe.profiles, profile: chosen}})
    check_fit(out, profile)
    return out


def _with_setting(profile: Profile, host: str, word: str, key: str, value: Any) -> Profile:
    """The profile with a field set; arguments of the host that say the same give way to the command line."""
    try:
        changed = Profile.model_validate({**profile.model_dump(), key: value})
    except ValidationError as error:
        raise ConfigError(f"{word}: {error.errors()[0]['msg']}") from None
    same = SAME[host].get(key, ())
    arguments = flatten(changed.arguments) if host == "verl" else changed.arguments
    return changed.model_copy(update={"arguments": {k: v for k, v in arguments.items() if k not in same}})
