"""Recipe files as data: YAML with the line of every key, merged with the bases a file extends.

`extends: base/trl.yaml`, or a list whose later entries win; paths are relative to the file. Mappings are merged key by
key, anything else replaces what the base says, and `null` removes it. A plug-in of another name replaces that of the
base with its parameters; a mapping without a name sets parameters of the base's plug-in.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from ..core.errors import ConfigError, close_matches

KeyPath = tuple[str | int, ...]


class RecipeError(ConfigError):
    """Mistakes in recipe files: where each is and what is accepted there."""


class Place(NamedTuple):
    """A line of a file, from 1."""

    file: Path
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


@dataclass
class Document:
    """A file with its bases merged in, and the place of every key and list entry by its path."""

    path: Path
    data: dict[str, Any]
    places: dict[KeyPath, Place] = field(default_factory=dict)

    def place(self, *where: str | int) -> Place:
        """Where a key stands, or the nearest key around it."""
        for n in range(len(where), 0, -1):
            if where[:n] in self.places:
                return self.places[where[:n]]
        return Place(self.path, 1)


def read_document(path: Path, extended_by: tuple[Path, ...] = ()) -> Document:
    """Read a file and the bases it extends. RecipeError for a file that can't be read, a missing base or a cycle."""
    own = _read_alone(path)
    bases = own.data.pop("extends", [])
    where = own.place("extends")
    names = [bases] if isinstance(bases, str) else bases
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise RecipeError(f"{where}: extends: expected a file or a list of files, got {bases!r}")
    chain = (*extended_by, path)
    merged = Document(path, {})
    for name in names:
        base = path.parent / name
        if base.resolve() in {p.resolve() for p in chain}:
            circle = " -> ".join(p.name for p in (*chain, base))
            raise RecipeError(f"{where}: extends: {name} leads back to itself ({circle})")
        if not base.is_file():
            raise RecipeError(f"{where}: extends: no such file {base}{similar_files(base)}")
        merged = _merge(merged, read_document(base, chain))
    return _merge(merged, own)


def merged(base: Mapping[str, Any], change: Mapping[str, Any], path: KeyPath = ()) -> dict[str, Any]:
    """`base` with `change` on top: mappings merge, anything else replaces, None removes what the base has."""
    out = dict(base)
    for key, value in change.items():
        there = out.get(key)
        if value is None and key in out:
            del out[key]
        elif _holds_plugins(path) and isinstance(value, Mapping) and isinstance(there, (str, Mapping)):
            out[key] = _plugin(there, value)
        elif isinstance(value, Mapping) and isinstance(there, Mapping):
            out[key] = merged(there, value, (*path, key))
        else:
            out[key] = value
    return out


def similar_files(path: Path) -> str:
    """`; did you mean ...` for the YAML files beside a path that is not there, or in folders beside its folder."""
    folder = path.parent
    if folder.is_dir():
        return close_matches(path.name, [p.name for p in folder.glob("*.yaml")])
    found = [f"{p.parent.name}/{p.name}" for p in folder.parent.glob("*/*.yaml")]
    return close_matches(f"{folder.name}/{path.name}", found)


PLUGINS: KeyPath = ("plugins",)


def _holds_plugins(path: KeyPath) -> bool:
    """Whether the keys at `path` are kinds: `plugins`, or `profiles.<name>.plugins`."""
    return path == PLUGINS or (len(path) == 3 and path[0] == "profiles" and path[2] == "plugins")


def _plugin(base: str | Mapping[str, Any], change: Mapping[str, Any]) -> dict[str, Any]:
    named = {"name": base} if isinstance(base, str) else base
    same = "name" not in change or change["name"] == named.get("name")
    return merged(named, change) if same else dict(change)


def _merge(base: Document, own: Document) -> Document:
    data = merged(base.data, own.data)
    places = {path: place for path, place in {**base.places, **own.places}.items() if _has(data, path)}
    return Document(own.path, data, places)


def _has(data: Any, path: Iterable[str | int]) -> bool:
    for key in path:
        if isinstance(data, Mapping) and key in data:
            data = data[key]
        elif isinstance(data, list) and isinstance(key, int) and key < len(data):
            data = data[key]
        else:
            return False
    return True


def _read_alone(path: Path) -> Document:
    try:
        text = path.read_text()
    except FileNotFoundError:
        raise RecipeError(f"{path}: no such file{similar_files(path)}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(f"{path}: cannot be read: {error}") from None
    try:
        loader = yaml.SafeLoader(text)
        node = loader.get_single_node()
        data = loader.construct_document(node) if node is not None else None
        places = _key_places(path, node)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{path}:{mark.line + 1}" if mark else str(path)
        raise RecipeError(f"{where}: not YAML: {_in_plain_words(error)}") from None
    if not isinstance(data, dict):
        raise RecipeError(f"{path}: a recipe is a mapping of keys such as name, host, plugins, profiles")
    return Document(path, data, places)


def _in_plain_words(error: yaml.YAMLError) -> str:
    """What the parser says, with the usual cause of what it says about blocks, mappings and tabs."""
    problem = str(getattr(error, "problem", None) or error)
    if "mapping values are not allowed" in problem:
        return f"{problem}; here or in the line before, a space after a colon is missing or the indentation is off"
    if "<block" in problem:
        return f"{problem}; is this line indented like its neighbours?"
    if "'\\t'" in problem:
        return f"{problem}; indent with spaces, not tabs"
    return problem


def _key_places(file: Path, node: yaml.Node | None, path: KeyPath = ()) -> dict[KeyPath, Place]:
    """The place of every key and list entry below `node`. RecipeError for a key that is given twice."""
    places: dict[KeyPath, Place] = {}
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            here = (*path, key.value)
            place = Place(file, key.start_mark.line + 1)
            if here in places:
                raise RecipeError(f"{place}: the key {key.value!r} is given twice (first in line {places[here].line})")
            places |= {here: place, **_key_places(file, value, here)}
    elif isinstance(node, yaml.SequenceNode):
        for i, value in enumerate(node.value):
            here = (*path, i)
            places |= {here: Place(file, value.start_mark.line + 1), **_key_places(file, value, here)}
    return places
