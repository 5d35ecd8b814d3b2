"""Plug-ins by (kind, name): built-ins imported on first use, third parties' through entry points."""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
import pkgutil
import re
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from .errors import ConfigError, RegistrationError, close_matches
from .kinds import FOLDERS, KINDS, Plugin, RolloutPart, UpdatePart, is_dataclass_plugin
from .params import check_names

ENTRY_POINT_GROUP = "rlx_plugins.plugins"
_PACKAGE = "rlx_plugins"
_NAME = re.compile(r"[A-Za-z0-9_-]+")
_NOT_HOOKS = {"check", "params", "replace", "state_dict", "load_state_dict"}

_registered: dict[tuple[str, str], type[Plugin]] = {}
_entry_point_failures: dict[str, str] = {}

PluginClass = TypeVar("PluginClass", bound=type[Plugin])


def register(kind: str, name: str) -> Callable[[PluginClass], PluginClass]:
    """Class decorator: make a dataclass available as plug-in `name` of `kind`.

        @rlx.register("clip", "hard")
        @dataclass
        class Hard(rlx.Clip):
            eps: float = 0.1
            def __call__(self, terms): ...

    Raises RegistrationError when the class does not fit the protocol of its kind (both signatures side by side), and
    when the name is taken by another class.
    """
    protocol = KINDS.get(kind)
    if protocol is None:
        raise RegistrationError(f"unknown kind {kind!r}{close_matches(kind, KINDS)} (kinds: {', '.join(KINDS)})")

    def decorate(cls: PluginClass) -> PluginClass:
        _check_fits(kind, name, cls, protocol)
        taken = _registered.get((kind, name))
        if taken is not None and (taken.__module__, taken.__qualname__) != (cls.__module__, cls.__qualname__):
            raise RegistrationError(f"{kind} {name!r} is already {taken.__module__}.{taken.__qualname__}")
        if taken is None and not cls.__module__.startswith(f"{_PACKAGE}.") and name in builtin_names(kind):
            raise RegistrationError(f"{kind} {name!r} is a built-in; choose another name")
        cls.kind, cls.name = kind, name
        _registered[kind, name] = cls
        return cls

    return decorate


def find(kind: str, name: str) -> type[Plugin]:
    """The class of plug-in `name`; raises ConfigError listing the close matches when there is none."""
    if kind not in KINDS:
        raise ConfigError(f"unknown kind {kind!r}{close_matches(kind, KINDS)} (kinds: {', '.join(KINDS)})")
    if (kind, name) not in _registered and name in builtin_names(kind):
        importlib.import_module(f"{_PACKAGE}.{FOLDERS[kind]}.{name}")
    if (kind, name) not in _registered:
        load_entry_points()
    if (kind, name) not in _registered:
        message = f"unknown {kind} {name!r}{close_matches(name, names(kind))} (rlx list {kind})"
        elsewhere = [k for k in KINDS if k != kind and name in names(k)]
        if elsewhere:
            message += f"; there is a plug-in of that name of kind {' and '.join(elsewhere)}"
        for source, error in _entry_point_failures.items():
            message += f"\nentry point {source} could not be loaded: {error}"
        raise ConfigError(message)
    return _registered[kind, name]


def create(kind: str, name: str, /, **parameters: Any) -> Any:
    """A plug-in by name with its parameters checked: `create("clip", "bapo", target=1.0)`."""
    cls = find(kind, name)
    check_names(f"{kind} {name}", cls, parameters)
    return cls(**parameters)


def names(kind: str) -> list[str]:
    """Names of all plug-ins of a kind, built-in and third-party, sorted."""
    load_entry_points()
    return sorted(set(builtin_names(kind)) | {n for k, n in _registered if k == kind})


@cache
def builtin_names(kind: str) -> frozenset[str]:
    """Names of the built-in plug-ins of a kind: the public modules of its folder. Nothing is imported."""
    folder = Path(__file__).parent.parent / FOLDERS[kind]
    return frozenset(m.name for m in pkgutil.iter_modules([str(folder)]) if not m.name.startswith("_"))


@cache
def load_entry_points() -> None:
    """Import what other distributions offer under `rlx_plugins.plugins`, once.

    A failing one is kept for `entry_point_failures` and for the error of a name that was not found: it breaks nobody
    who does not use it.
    """
    for point in importlib.metadata.entry_points(group=ENTRY_POINT_GROUP):
        source = f"{point.name} = {point.value}" + (f" (from {point.dist.name})" if point.dist else "")
        try:
            point.load()
        except Exception as error:  # a third party's import may raise anything
            _entry_point_failures[source] = f"{type(error).__name__}: {error}"


def entry_point_failures() -> dict[str, str]:
    """Entry points that could not be loaded, with the error of each."""
    load_entry_points()
    return dict(_entry_point_failures)


def implements(part: Plugin | type[Plugin], hook: str) -> bool:
    """Whether a plug-in defines `hook` itself instead of inheriting the protocol's default.

    A plug-in whose parameters leave the hook without work (`idle_hooks`) counts as one that does not.
    """
    if not isinstance(part, type) and hook in part.idle_hooks:
        return False
    cls = part if isinstance(part, type) else type(part)
    protocol = KINDS[cls.kind]
    return getattr(cls, hook, None) is not getattr(protocol, hook, None)


def _hooks(cls: type) -> set[str]:
    """Every method of a protocol base that a plug-in may define."""
    return {
        name
        for base in cls.__mro__
        if base in _PROTOCOL_BASES
        for name, value in vars(base).items()
        if callable(value) and (name == "__call__" or not name.startswith("_")) and name not in _NOT_HOOKS
    }


_PROTOCOL_BASES = {RolloutPart, UpdatePart, *KINDS.values()}


def _check_fits(kind: str, name: str, cls: type, protocol: type[Any]) -> None:
    label = f"{kind} {name!r} ({cls.__module__}.{cls.__qualname__})"
    if not _NAME.fullmatch(name):
        raise RegistrationError(f"{label}: a name has letters, digits, _ and - only; flags give others a meaning")
    if not (isinstance(cls, type) and issubclass(cls, protocol)):
        raise RegistrationError(f"{label} must derive from rlx_plugins.{protocol.__name__}")
    if not is_dataclass_plugin(cls):
        raise RegistrationError(f"{label} must be a dataclass: put @dataclass below @register")
    asked = set(protocol.must) | set(protocol.may)
    for hook in sorted(_hooks(cls)):
        own = getattr(cls, hook)
        expected = getattr(protocol, hook)
        if own is expected:
            if hook in protocol.must:
                raise RegistrationError(f"{label} lacks {hook}{inspect.signature(expected)}")
            continue
        if hook not in asked:
            raise RegistrationError(
                f"{label} defines {hook}, which a {kind} is never asked for; it is asked for {', '.join(sorted(asked))}"
            )
        have, want = inspect.signature(own), inspect.signature(expected)
        if list(have.parameters) != list(want.parameters):
            raise RegistrationError(f"{label}.{hook} does not fit\n  it has   {hook}{have}\n  expected {hook}{want}")


def forget(kind: str, name: str) -> None:
    """Remove a registration (for tests that register their own)."""
    cls = _registered.pop((kind, name), None)
    if cls is not None and cls.__module__.startswith(f"{_PACKAGE}."):
        sys.modules.pop(cls.__module__, None)
