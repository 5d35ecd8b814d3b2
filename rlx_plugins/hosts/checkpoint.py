"""State of the plug-ins beside a host's own checkpoint."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from ..core.config import Parts
from ..core.errors import ConfigError
from ..core.state import state_fields

FILE = "rlx_plugins.pt"


def save_parts(parts: Parts, folder: str) -> None:
    """Write the state of every part to `folder`."""
    write_whole(parts.state_dict(), Path(folder) / FILE)


def write_whole(values: Any, target: Path) -> None:
    """Write `values` with torch.save, whole or not at all."""
    os.makedirs(target.parent, exist_ok=True)
    unfinished = target.with_suffix(".tmp")
    with open(unfinished, "wb") as f:
        torch.save(values, f)
        f.flush()
        os.fsync(f.fileno())
    os.replace(unfinished, target)


def load_parts(parts: Parts, folder: str) -> None:
    """Restore the state of every part; refuses a checkpoint without it if any part has state."""
    path = Path(folder) / FILE
    if path.exists():
        parts.load_state_dict(torch.load(path, map_location="cpu", weights_only=True))
        return
    stateful = [f"{p.kind} {p.name}" for p in parts if state_fields(p)]
    if stateful:
        raise ConfigError(
            f"{folder} has no {FILE}: it was written without plug-ins, but {', '.join(stateful)} would go on from state"
        )
