"""Checks of what is relied on in a host: signatures, attributes, fragments of source, by dotted path."""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
import re
from collections.abc import Mapping
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
    problems = []
    for path, names in wanted.items():
        function = find(path)
        if function is None:
            problems.append(f"{where(path)} is gone")
            continue
        have = list(inspect.signature(function).parameters)
        if have != names.split():
            called = ", ".join(names.split())
            problems.append(f"{where(path)} takes ({', '.join(have)}), this host calls it with ({called})")
    return problems


def check_attributes(wanted: Mapping[str, str]) -> list[str]:
    """Classes whose constructors no longer set the attributes of `wanted`."""
    problems = []
    for path, names in wanted.items():
        cls = find(path)
        if cls is None:
            problems.append(f"{where(path)} is gone")
            continue
        source = "".join(
            inspect.getsource(c.__init__) for c in cls.__mro__ if "__init__" in vars(c) and c is not object
        )
        set_there = set(re.findall(r"self\.(\w+)(?:,[\w., ]+)?(?::[^=\n]+)?\s*=[^=]", source))
        problems += [f"{where(path)} no longer sets .{name}" for name in names.split() if name not in set_there]
    return problems


def check_mentions(wanted: Mapping[str, str]) -> list[str]:
    """Functions or classes whose source no longer contains the fragments of `wanted`, blanks left out."""
    problems = []
    for path, fragments in wanted.items():
        found = find(path)
        if found is None:
            problems.append(f"{where(path)} is gone")
            continue
        source = re.sub(r"\s+", "", inspect.getsource(found))
        listed = re.sub(r", ", ",", fragments).split()
        problems += [f"{where(path)} no longer contains {f}" for f in listed if f not in source]
    return problems


def check_fields(path: str, names: str) -> list[str]:
    """Dataclass fields that are no longer there."""
    known = getattr(find(path), "__dataclass_fields__", {})
    return [f"{where(path)} has no field {name!r}" for name in names.split() if name not in known]
