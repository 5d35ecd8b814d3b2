"""Hyper-parameters of a plug-in: dataclass fields with a default, a type and a range, checked with the field's name."""

from __future__ import annotations

import dataclasses
import math
import operator
import types
import typing
from collections.abc import Mapping
from typing import Any

from .errors import ConfigError, close_matches

_COMPARISONS = {
    "ge": (">=", operator.ge),
    "gt": (">", operator.gt),
    "le": ("<=", operator.le),
    "lt": ("<", operator.lt),
}


def param(
    default: Any = dataclasses.MISSING,
    *,
    ge: float | None = None,
    gt: float | None = None,
    le: float | None = None,
    lt: float | None = None,
    doc: str = "",
    factory: Any = dataclasses.MISSING,
) -> Any:
    """Declare a hyper-parameter with bounds: `eps_low: float = param(0.2, ge=0, lt=1, doc="PPO's 0.2")`.

    The bounds hold for a number and for every entry of a tuple or dict of numbers, and are skipped for None. An
    infinite value passes unless a bound excludes it; NaN never does. A plain `name: type = default` is a parameter
    without bounds.
    """
    metadata = {"bounds": {"ge": ge, "gt": gt, "le": le, "lt": lt}, "doc": doc}
    return dataclasses.field(default=default, default_factory=factory, metadata=metadata)


def param_fields(cls: Any) -> dict[str, dataclasses.Field[Any]]:
    """The hyper-parameters of a plug-in class (or object) by name, in order."""
    return {f.name: f for f in dataclasses.fields(cls) if f.init}


def field_types(cls: Any) -> dict[str, Any]:
    """Resolved type of every field of `cls`."""
    return typing.get_type_hints(cls)


def check_names(label: str, cls: type, given: Mapping[str, Any]) -> None:
    """Refuse a parameter `cls` does not have, and a missing one that has no default."""
    known = param_fields(cls)
    for name in given:
        if name not in known:
            accepted = ", ".join(known) or "no parameters"
            near = close_matches(name, known)
            raise ConfigError(f"{label}: unknown parameter {name!r}{near} (it accepts {accepted})")
    for name, f in known.items():
        required = f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
        if required and name not in given:
            raise ConfigError(f"{label}: parameter {name!r} has no default and must be given")


def checked(label: str, part: Any) -> dict[str, Any]:
    """The parameters of `part` coerced to their declared types (int to float, list to tuple) and checked for range."""
    hints = field_types(type(part))
    out = {}
    for name, f in param_fields(part).items():
        value = _coerce(f"{label}.{name}", hints[name], getattr(part, name))
        _check_bounds(f"{label}.{name}", f.metadata.get("bounds", {}), value)
        out[name] = value
    return out


def _type_name(t: Any) -> str:
    if t is type(None):
        return "None"
    if typing.get_origin(t) in (typing.Union, types.UnionType):
        return " or ".join(_type_name(a) for a in typing.get_args(t))
    if typing.get_origin(t) is typing.Literal:
        return "one of " + ", ".join(map(repr, typing.get_args(t)))
    return getattr(t, "__name__", str(t)) if not typing.get_args(t) else str(t)


def _coerce(where: str, t: Any, value: Any) -> Any:
    wrong = ConfigError(f"{where}: expected {_type_name(t)}, got {value!r}")
    origin, args = typing.get_origin(t), typing.get_args(t)
    if t is Any:
        return value
    if origin in (typing.Union, types.UnionType):
        for option in args:
            try:
                return _coerce(where, option, value)
            except ConfigError:
                continue
        raise wrong
    if origin is typing.Literal:
        if any(type(value) is type(choice) and value == choice for choice in args):
            return value
        raise ConfigError(f"{wrong}{close_matches(str(value), map(str, args))}")
    if t is type(None):
        if value is None:
            return None
        raise wrong
    if t is bool:
        if isinstance(value, bool):
            return value
        raise wrong
    if t is int:
        if isinstance(value, int) and not isinstance(value, bool):
            return value
        if isinstance(value, float) and value.is_integer():
            return int(value)
        raise wrong
    if t is float:
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            return float(value)
        raise wrong
    if origin is tuple or t is tuple:
        if not isinstance(value, (list, tuple)):
            raise wrong
        if len(args) == 2 and args[1] is Ellipsis:
            return tuple(_coerce(f"{where}[{i}]", args[0], v) for i, v in enumerate(value))
        if args and len(args) != len(value):
            raise wrong
        types_of = args or (Any,) * len(value)
        return tuple(_coerce(f"{where}[{i}]", a, v) for i, (a, v) in enumerate(zip(types_of, value)))
    if origin is dict or t is dict:
        if not isinstance(value, Mapping):
            raise wrong
        key_t, value_t = args or (Any, Any)
        return {_coerce(f"{where} key", key_t, k): _coerce(f"{where}[{k!r}]", value_t, v) for k, v in value.items()}
    if isinstance(t, type):
        if isinstance(value, t):
            return value
        raise wrong
    return value


def _check_bounds(where: str, bounds: Mapping[str, float | None], value: Any) -> None:
    if isinstance(value, bool) or value is None:
        return
    if isinstance(value, (tuple, list)):
        for i, v in enumerate(value):
            _check_bounds(f"{where}[{i}]", bounds, v)
        return
    if isinstance(value, Mapping):
        for k, v in value.items():
            _check_bounds(f"{where}[{k!r}]", bounds, v)
        return
    if not isinstance(value, (int, float)):
        return
    if math.isnan(value):
        raise ConfigError(f"{where}: NaN is not a value")
    for name, limit in bounds.items():
        sign, holds = _COMPARISONS[name]
        if limit is not None and not holds(value, limit):
            raise ConfigError(f"{where}: must be {sign} {limit:g}, got {value!r}")
