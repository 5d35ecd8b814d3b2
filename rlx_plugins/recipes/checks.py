"""Every mistake of a recipe file, each with the file and line it stands in. No host is imported."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from ..core.errors import ConfigError, close_matches
from .data_task import DataTask
from .documents import Document, KeyPath, RecipeError, merged, read_document
from .fit import check_fit
from .schema import HOSTS, Profile, Recipe, arguments_of, check_plugins, for_host, hosts_of
from .task import check_task, reward_names


def mistakes(path: Path) -> list[str]:
    """Every mistake of a recipe, or of a base (a file in a folder `base`, which may be a part of a recipe)."""
    try:
        return mistakes_in(read_document(path), fragment=path.resolve().parent.name == "base")
    except RecipeError as error:
        return str(error).split("\n")


def mistakes_in(document: Document, *, fragment: bool = False) -> list[str]:
    """Every mistake of a document, one a line; `fragment`: keys may be missing."""
    found = [*_host_mistakes(document), *_argument_mistakes(document)]
    found += _schema_mistakes(document, fragment=fragment)
    if not found:
        found += _plugin_mistakes(document)
    if not found and not fragment:
        for host in hosts_of(document):
            found += _recipe_mistakes(document, for_host(document, host))
    return list(dict.fromkeys(found))


def _host_mistakes(document: Document) -> Iterator[str]:
    given = document.data.get("host")
    for host in hosts_of(document):
        if host not in HOSTS:
            near = close_matches(str(host), HOSTS)
            yield f"{document.place('host')}: host: unknown host, got {host!r}{near} (accepted: {', '.join(HOSTS)})"
    if isinstance(given, list) and (not given or len(set(map(str, given))) < len(given)):
        yield f"{document.place('host')}: host: expected different hosts, got {given}"


def _argument_mistakes(document: Document) -> Iterator[str]:
    """Mistakes in how `arguments` are given: by host, or plain in a recipe for one host."""
    for where, given in arguments_of(document):
        by_host = [key for key in given if key in HOSTS]
        place, label = document.place(*where), ".".join(where)
        if by_host and len(by_host) < len(given):
            other = next(key for key in given if key not in HOSTS)
            yield f"{place}: {label}: {other!r} stands beside {by_host[0]!r}: arguments by host have no other keys"
        elif by_host and not all(given[key] is None or isinstance(given[key], dict) for key in by_host):
            yield f"{place}: {label}: expected a mapping of arguments for each host"
        elif given and not by_host and len(hosts_of(document)) > 1:
            yield f"{place}: {label}: the recipe is for several hosts: give arguments by host, {{trl: {{...}}}}"


def _schema_mistakes(document: Document, *, fragment: bool) -> Iterator[str]:
    data = document.data | ({"host": HOSTS[0]} if "host" in document.data else {})  # hosts have been looked at
    try:
        Recipe.model_validate(data)
    except ValidationError as error:
        for e in error.errors():
            is_other_form = e["loc"][-1] == "str" and isinstance(e["input"], dict)  # of `task: str | DataTask`
            if not is_other_form and not (fragment and e["type"] == "missing"):
                yield _explain(document, e)


def _explain(document: Document, error: Any) -> str:
    where = tuple(p for p in error["loc"] if p not in ("[key]", "str", "DataTask"))
    place, name = document.place(*where), ".".join(map(str, where))
    if error["type"] == "extra_forbidden":
        model = DataTask if "task" in where else Profile if where[0] == "profiles" else Recipe
        near = close_matches(str(where[-1]), model.model_fields)
        return f"{place}: unknown key {name!r}{near} (accepted: {', '.join(model.model_fields)})"
    if error["type"] == "missing":
        return f"{place}: the key {name!r} is missing"
    return f"{place}: {name}: {error['msg']}, got {error['input']!r}"


def _plugin_mistakes(document: Document) -> Iterator[str]:
    """Unknown kinds, names and parameters, kind by kind, in the recipe's plug-ins and in each profile's."""
    plugins = document.data.get("plugins") or {}
    yield from _each_plugin(document, plugins, ("plugins",))
    for name, profile in (document.data.get("profiles") or {}).items():
        if change := (profile or {}).get("plugins"):
            whole = merged({"plugins": plugins}, {"plugins": change})["plugins"]
            changed = {kind: whole[kind] for kind in change if _is_named(whole.get(kind))}
            yield from _each_plugin(document, changed, ("profiles", name, "plugins"))


def _is_named(value: Any) -> bool:
    """Not a fragment's mapping of parameters for a plug-in that only the recipe names."""
    return value is not None and not (isinstance(value, Mapping) and "name" not in value)


def _each_plugin(document: Document, plugins: Mapping[str, Any], where: KeyPath) -> Iterator[str]:
    for key, value in plugins.items():
        try:
            check_plugins({key: value})
        except ConfigError as error:
            yield f"{_place_of_parameter(document, (*where, key), str(error))}: {error}"


def _place_of_parameter(document: Document, where: KeyPath, message: str) -> Any:
    """The line of the parameter a message speaks of, else of its plug-in."""
    words = {word.strip("'\":;,().") for word in message.replace(".", " ").replace(":", " ").split()}
    below = [path for path in document.places if path[: len(where)] == where and path != where]
    named = [path for path in below if str(path[-1]) in words]
    return document.place(*(named[0] if named else where))


def _recipe_mistakes(document: Document, recipe: Recipe) -> Iterator[str]:
    """What a whole recipe gets wrong: weights, rewards, plug-ins that do not go with each other or with the host."""
    for name, profile in recipe.profiles.items():
        at = ("profiles", name)
        if profile.weights is not None and len(profile.weights) != len(profile.rewards):
            counts = f"{len(profile.weights)} weights for {len(profile.rewards)} rewards"
            yield f"{document.place(*at, 'weights')}: profiles.{name}.weights: {counts}"
        try:
            check_task(profile.task)
        except ConfigError as error:
            yield f"{document.place(*at, 'task')}: profiles.{name}.task: {error}"
            continue
        known = reward_names(profile.task)
        for i, reward in enumerate(profile.rewards):
            if known is not None and ":" not in reward and reward not in known:
                has = f"{close_matches(reward, known)} (the task has {', '.join(known)}; or package.module:function)"
                yield f"{document.place(*at, 'rewards', i)}: profiles.{name}.rewards: unknown reward {reward!r}{has}"
        try:
            check_fit(recipe, name)
        except ConfigError as error:
            yield f"{_place_of_plugin(document, at, str(error))}: profile {name}, host {recipe.host}: {error}"


def _place_of_plugin(document: Document, profile: KeyPath, message: str) -> Any:
    kind = message.split()[0].strip(":")
    for where in ((*profile, "plugins", kind), ("plugins", kind)):
        if where in document.places:
            return document.places[where]
    return document.place("plugins")
