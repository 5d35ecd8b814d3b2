"""State of the plug-ins beside the trainer's own checkpoint."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from transformers.trainer import TRAINER_STATE_NAME

from ...core.config import Parts
from ...core.errors import ConfigError
from ...core.state import state_fields

FILE = "rlx_plugins.pt"


def save_parts(parts: Parts, folder: str) -> None:
    """Write the state of every part to `folder`, whole or not at all."""
    os.makedirs(folder, exist_ok=True)
    target = Path(folder) / FILE
    unfinished = target.with_suffix(".tmp")
    with open(unfinished, "wb") as f:
        torch.save(parts.state_dict(), f)
        f.flush()
        os.fsync(f.fileno())
    os.replace(unfinished, target)


def load_parts(parts: Parts, folder: str) -> None:
    """Restore the state of every part; refuses a checkpoint without it if any part has state, and an unfinished one."""
    if not (Path(folder) / TRAINER_STATE_NAME).exists():
        raise ConfigError(
            f"{folder} has no {TRAINER_STATE_NAME}: the run ended while it was written; resume from the one before"
        )
    path = Path(folder) / FILE
    if path.exists():
        parts.load_state_dict(torch.load(path, map_location="cpu", weights_only=True))
        return
    stateful = [f"{p.kind} {p.name}" for p in parts if state_fields(p)]
    if stateful:
        raise ConfigError(
            f"{folder} has no {FILE}: it was written without plug-ins, but {', '.join(stateful)} would go on from state"
        )
