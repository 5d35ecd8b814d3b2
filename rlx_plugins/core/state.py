"""State of a plug-in: what changes from step to step, declared in one place, saved and restored whole."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from .errors import ConfigError


def state(default: Any = dataclasses.MISSING, *, factory: Callable[[], Any] | None = None) -> Any:
    """Declare a dataclass field as state: not a parameter, saved with the host's checkpoint, restored on resume.

    Keep to plain Python values and tensors (numbers, strings, lists, tuples, dicts): checkpoints are read back with
    `torch.load(weights_only=True)`.

        seen: dict = state(factory=dict)
        ema: float = state(0.0)
    """
    if factory is not None:
        return dataclasses.field(init=False, repr=False, default_factory=factory, metadata={"state": True})
    return dataclasses.field(init=False, repr=False, default=default, metadata={"state": True})


def state_fields(part: Any) -> list[str]:
    """Names of the fields of `part` declared with `state()`, in order."""
    return [f.name for f in dataclasses.fields(part) if f.metadata.get("state")]


def state_dict(part: Any) -> dict[str, Any]:
    """A deep copy of the state of `part`; later steps do not change it."""
    return {name: copy.deepcopy(getattr(part, name)) for name in state_fields(part)}


def load_state_dict(part: Any, saved: Mapping[str, Any]) -> None:
    """Restore the state of `part`; refuses a checkpoint whose fields are not those of `part`, changing nothing."""
    wanted, found = set(state_fields(part)), set(saved)
    if wanted != found:
        raise ConfigError(
            f"{part.kind} {part.name}: the checkpoint's state does not fit"
            f" (missing {sorted(wanted - found)}, unknown {sorted(found - wanted)})"
        )
    for name, value in saved.items():
        setattr(part, name, copy.deepcopy(value))
