"""The folder of one run: what was run, its metrics line by line, its summary, its curves, its checkpoints."""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..core.errors import ConfigError


@dataclass
class RunFolder:
    """`runs/<name>`: recipe.json (resolved), metrics.jsonl, summary.json or failure.json, curves.png, checkpoints/."""

    path: Path

    @classmethod
    def open(cls, path: str | Path, *, resume: bool = False, overwrite: bool = False) -> RunFolder:
        """Create the folder, or take an existing one if told to.

        Raises ConfigError when it can't be written, or holds another run and neither `resume` nor `overwrite` is set.
        """
        if resume and overwrite:
            raise ConfigError("--resume and --overwrite exclude each other: go on with the run, or start it anew")
        folder = cls(Path(path))
        if folder.holds_run() and not (resume or overwrite):
            raise ConfigError(f"{folder.path} already holds a run; use --resume, --overwrite, or another --output")
        try:
            folder.path.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder.path):
                pass
        except OSError as error:
            raise ConfigError(f"the run folder {folder.path} can't be written: {error}") from None
        if overwrite:
            folder.metrics.unlink(missing_ok=True)
            folder.summary.unlink(missing_ok=True)
            shutil.rmtree(folder.checkpoints, ignore_errors=True)  # else a later --resume would go on from the old run
        return folder

    def holds_run(self) -> bool:
        """Whether a run stands here. A start that failed before its first step and checkpoint is none."""
        trained = bool(self.records()) or (self.checkpoints.is_dir() and any(self.checkpoints.iterdir()))
        return self.recipe.exists() and (trained or not self.failure.exists())

    @property
    def recipe(self) -> Path:
        return self.path / "recipe.json"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def summary(self) -> Path:
        return self.path / "summary.json"

    @property
    def failure(self) -> Path:
        return self.path / "failure.json"

    @property
    def curves(self) -> Path:
        return self.path / "curves.png"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    def log(self, record: Mapping[str, Any]) -> None:
        """Append one line of metrics; numbers that are not finite become null."""
        clean = {k: (None if isinstance(v, float) and not math.isfinite(v) else v) for k, v in record.items()}
        with self.metrics.open("a") as f:
            f.write(json.dumps(clean) + "\n")

    def records(self) -> list[dict[str, Any]]:
        """All complete lines of metrics, one per step (the last one wins after a resume), in order of steps."""
        by_step: dict[int, dict[str, Any]] = {}
        for line in self._lines():
            with contextlib.suppress(json.JSONDecodeError):  # the line a killed run was writing
                record = json.loads(line)
                by_step[record["step"]] = record
        return [by_step[step] for step in sorted(by_step)]

    def _lines(self) -> Iterator[str]:
        if self.metrics.exists():
            yield from self.metrics.read_text().splitlines()


def is_main_process() -> bool:
    """Whether this process writes the run's folder: rank 0 of accelerate or torchrun, or one without a launcher."""
    return int(os.environ.get("RANK", "0")) == 0


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file whole or not at all."""
    write_text(path, json.dumps(value, indent=2) + "\n")


def write_text(path: Path, text: str) -> None:
    """Write a file whole or not at all."""
    fd, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".tmp")
    try:
        with os.fdopen(fd, "w") as f:
            f.write(text)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise


def read_json(path: Path) -> Any:
    """The value of a JSON file."""
    return json.loads(path.read_text())


def summarise(records: list[dict[str, Any]], window: int = 10) -> dict[str, Any]:
    """First and last mean reward (over `window` steps), steps, tokens and seconds of a run's metrics."""
    rewards = [r["reward"] for r in records if r.get("reward") is not None]
    n = min(window, max(1, len(rewards) // 10))
    return {
        "steps": records[-1]["step"] if records else 0,
        "reward_first": sum(rewards[:n]) / n if rewards else None,
        "reward_last": sum(rewards[-n:]) / n if rewards else None,
        "window": n,
        "tokens": max((r.get("generated_tokens") or 0 for r in records), default=0),
        "seconds": max((r.get("seconds") or 0.0 for r in records), default=0.0),
    }
