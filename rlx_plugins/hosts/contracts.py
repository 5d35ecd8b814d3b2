"""Checks of what is relied on in a host: signatures, attributes, fragments of source, by dotted path."""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any

DISTRIBUTIONS = {"transfer_queue": "TransferQueue"}
"""Package -> distribution, where the names differ."""


def find(path: str) -> Any:
    """The object at a dotted path, None if there is none."""
    module, *rest = path.split(".")
    found: Any = importlib.import_module(module)
    for i, name in enumerate(rest):
        if not hasattr(found, name) and inspect.ismodule(found):
            inner = ".".join([module, *rest[: i + 1]])
            try:
                importlib.import_module(inner)
            except ModuleNotFoundError as error:
                if error.name != inner:  # the module is there, but not what it needs
                    raise
                return None
        found = getattr(found, name, None)
    metadata = getattr(found, "__ray_metadata__", None)  # a class behind ray.remote
    return found if metadata is None else metadata.modified_class.__ray_actor_class__


def where(path: str) -> str:
    """The path with the package's installed version."""
    package = path.split(".")[0]
    return f"{package} {importlib.metadata.version(DISTRIBUTIONS.get(package, package))}: {path}"


def check_parameters(wanted: Mapping[str, str]) -> list[str]:
    """Functions whose parameters, in order, are no longer those of `wanted`."""

    def problems(path: str, function: Any, names: str) -> list[str]:
        have, called = list(inspect.signature(function).parameters), names.split()
        if have == called:
            return []
        return [f"{where(path)} takes ({', '.join(have)}), this host calls it with ({', '.join(called)})"]

    return _check_each(wanted, problems)


def check_attributes(wanted: Mapping[str, str]) -> list[str]:
    """Classes whose constructors no longer set the attributes of `wanted`."""

    def problems(path: str, cls: Any, names: str) -> list[str]:
        constructors = [c.__init__ for c in cls.__mro__ if "__init__" in vars(c) and c is not object]
        source = "".join(map(inspect.getsource, constructors))
        set_there = set(re.findall(r"self\.(\w+)(?:,[\w., ]+)?(?::[^=\n]+)?\s*=[^=]", source))
        return [f"{where(path)} no longer sets .{name}" for name in names.split() if name not in set_there]

    return _check_each(wanted, problems)


def check_mentions(wanted: Mapping[str, str]) -> list[str]:
    """Functions or classes whose source no longer contains the fragments of `wanted`, blanks left out."""

    def problems(path: str, found: Any, fragments: str) -> list[str]:
        source = re.sub(r"\s+", "", inspect.getsource(found))
        listed = re.sub(r", ", ",", fragments).split()
        return [f"{where(path)} no longer contains {f}" for f in listed if f not in source]

    return _check_each(wanted, problems)


def _check_each(wanted: Mapping[str, str], problems: Callable[[str, Any, str], list[str]]) -> list[str]:
    """What `problems` finds wrong with each object of `wanted`; one that is gone is a problem itself."""
    out = []
    for path, expected in wanted.items():
        found = find(path)
        out += [f"{where(path)} is gone"] if found is None else problems(path, found, expected)
    return out


def check_fields(path: str, names: str) -> list[str]:
    """Dataclass fields that are no longer there."""
    known = getattr(find(path), "__dataclass_fields__", {})
    return [f"{where(path)} has no field {name!r}" for name in names.split() if name not in known]
