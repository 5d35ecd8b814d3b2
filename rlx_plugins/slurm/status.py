"""The runs in a folder: how far each has come, and what became of it."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..core.errors import ConfigError
from ..recipes.run_folder import RunFolder, read_json
from .job import recorded_job
from .queue import JobState, job_states

STALLED_AFTER = 600.0
"""Seconds without a new line of metrics after which a run that no Slurm vouches for counts as stalled; runs with long
steps get ten of them."""

_TAIL = 1 << 18
"""Bytes at the end of the metrics that hold its last complete line."""

_WORDS = {"COMPLETED": "finished", "FAILED": "failed", "NODE_FAIL": "failed", "BOOT_FAIL": "failed"}
"""Slurm's states in the words of a run; the others are shown in lower case."""


@dataclass
class RunStatus:
    """A run and its last metrics.

    state    Slurm's if a job is recorded and Slurm knows it (pending, running, finished, failed, cancelled, timeout,
             ...); else the folder's: finished, failed, running, stalled, or not started
    job      id of the Slurm job
    step, of, reward, seconds   of the last line of metrics; None without
    idle     seconds since that line was written
    note     why it failed, or why it waits
    """

    folder: str
    state: str
    job: str | None = None
    step: int | None = None
    of: int | None = None
    reward: float | None = None
    seconds: float | None = None
    idle: float | None = None
    note: str = ""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def statuses(folders: Iterable[Path]) -> list[RunStatus]:
    """The runs in `folders` and below, in order of their paths. ConfigError for a folder that is not there."""
    runs = [run for folder in folders for run in find_runs(folder)]
    jobs = {run: job for run in runs if (job := recorded_job(run)) is not None}
    known = job_states(jobs.values())
    now = time.time()
    return [run_status(run, jobs.get(run), known.get(jobs.get(run, "")), now) for run in dict.fromkeys(runs)]


def find_runs(folder: Path) -> list[Path]:
    """The run folders in `folder`: it and those below it that hold a run or wait for one."""
    if not folder.is_dir():
        raise ConfigError(f"{folder}: no such folder")
    found = []
    for path, below, _ in os.walk(folder):
        if RunFolder(Path(path)).recipe.exists() or recorded_job(Path(path)) is not None:
            found.append(Path(path))
            below.clear()
        below.sort()
    return found


def run_status(path: Path, job: str | None, slurm: JobState | None, now: float) -> RunStatus:
    """The status of one run; `now` as time.time() gives it."""
    folder = RunFolder(path)
    last = last_record(folder.metrics)
    state, note = folder_state(folder, last, now)
    if slurm is not None:
        state = _WORDS.get(slurm.state, slurm.state.lower().replace("_", " "))
        if not (note and state == "failed"):
            note = slurm.reason
    return RunStatus(
        folder=str(path),
        state=state,
        job=job,
        step=last.get("step"),
        of=last.get("max_steps"),
        reward=last.get("reward"),
        seconds=last.get("seconds"),
        idle=round(now - folder.metrics.stat().st_mtime, 1) if last else None,
        note=note,
    )


def folder_state(folder: RunFolder, last: dict[str, Any], now: float) -> tuple[str, str]:
    """What a run's folder says of it, and of a failed one why it failed."""
    if folder.failure.exists():
        error = str(read_json(folder.failure)["error"])
        return "failed", "interrupted" if error.startswith("KeyboardInterrupt") else error
    times = {path: path.stat().st_mtime for path in (folder.recipe, folder.metrics, folder.summary) if path.exists()}
    if not times:
        return "not started", ""
    if max(times, key=lambda path: times[path]) == folder.summary:
        return "finished", ""
    step_seconds = (last.get("seconds") or 0.0) / max(1, last.get("step") or 1)
    idle = now - max(times.values())
    return ("running" if idle < max(STALLED_AFTER, 10 * step_seconds) else "stalled"), ""


def last_record(metrics: Path) -> dict[str, Any]:
    """The last complete line of metrics; empty without one."""
    try:
        with metrics.open("rb") as f:
            f.seek(max(0, metrics.stat().st_size - _TAIL))
            lines = f.read().splitlines()
    except FileNotFoundError:
        return {}
    for line in reversed(lines):
        try:
            return dict(json.loads(line))
        except ValueError:  # the line a killed run was writing
            continue
    return {}
