"""What a hook of the update side returned, compared with what its kind promises."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .errors import RegistrationError

COLUMNS: dict[str, dict[str, str]] = {
    "reward": {"rewards": "B", "reward_components": "BK"},
    "advantage": {"advantages": "BT"},
    "correction": {"weight": "BT"},
    "aggregate": {"weight": "BT", "count": "B"},
    "selector": {"weight": "BT", "kept_length": "B"},
}
"""Kind -> the columns it returns, with their shapes."""

OPTIONAL = frozenset({"rewards", "reward_components", "kept_length"})
"""Columns that a part may leave out; a reward may also return `keep`, what it provides, or nothing."""


def check_columns(part: Any, returned: Any, mask: Tensor) -> None:
    """Refuse what is no mapping with the columns of the part's kind in their shapes (mask [B,T])."""
    promised = COLUMNS[part.kind]
    wanted = ", ".join(f'"{name}": [{",".join(dims)}]' for name, dims in promised.items())
    known = {*promised, "keep", *part.provides}
    if not isinstance(returned, Mapping) or (returned and known.isdisjoint(returned)):
        raise _unfit(part, description(returned), f"it returns a mapping with {{{wanted}}}")
    for name, dims in promised.items():
        found = returned.get(name)
        if found is None and name in OPTIONAL:
            continue
        shape = mask.shape[: 2 if "T" in dims else 1]
        fits = isinstance(found, Tensor) and found.ndim == len(dims) and found.shape[: len(shape)] == shape
        if not fits:
            seen = f"{name!r} as {description(found)}"
            raise _unfit(part, seen, f"it is a tensor [{','.join(dims)}] with {_sizes(dims, shape)}")


def check_token_tensor(part: Any, returned: Any, like: Tensor, hook: str = "") -> None:
    """Refuse what is no tensor [B,T] of the shape of `like`."""
    if not isinstance(returned, Tensor) or returned.shape != like.shape:
        wanted = f"it returns a tensor [B,T] with {_sizes('BT', like.shape)}"
        if part.kind == "clip":
            wanted += ", or that and a mapping of metrics"
        raise _unfit(part, description(returned), wanted, hook)


def description(value: Any) -> str:
    """A value in few words: the shape of a tensor, the keys of a mapping."""
    if isinstance(value, Tensor):
        return f"a tensor of shape {list(value.shape)}"
    if isinstance(value, Mapping):
        return f"a mapping with {', '.join(map(str, value)) or 'nothing'}"
    return "None" if value is None else f"{type(value).__name__} {value!r:.40}"


def _sizes(dims: str, shape: torch.Size | tuple[int, ...]) -> str:
    return ", ".join(f"{dim}={size}" for dim, size in zip(dims, shape))


def _unfit(part: Any, seen: str, wanted: str, hook: str = "") -> RegistrationError:
    where = f"{part.kind} {part.name}" + (f".{hook}" if hook else "")
    return RegistrationError(f"{where} returned {seen}; {wanted} (check_plugin tests a plug-in without a model)")
