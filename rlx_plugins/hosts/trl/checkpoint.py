"""Checkpoints of TRL's trainer that hold the state of the plug-ins."""

from __future__ import annotations

import json
from pathlib import Path

from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from ..checkpoint import FILE, load_parts, save_parts, write_whole

__all__ = ["FILE", "latest", "load_parts", "save_parts", "write_whole"]


def latest(folder: str, *, parts: bool = True) -> str | None:
    """The newest checkpoint in `folder` that was written to its end; the one a killed process was writing is not.

    `parts`: of a run with plug-ins, whose state belongs to it.
    """
    found = [p for p in Path(folder).glob(f"{PREFIX_CHECKPOINT_DIR}-*") if p.name.rpartition("-")[2].isdigit()]
    whole = [p for p in found if _is_json(p / TRAINER_STATE_NAME) and (not parts or (p / FILE).exists())]
    return str(max(whole, key=lambda p: int(p.name.rpartition("-")[2]))) if whole else None


def _is_json(path: Path) -> bool:
    try:
        json.loads(path.read_text())
    except (OSError, ValueError):
        return False
    return True
