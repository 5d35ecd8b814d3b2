"""The runs of a comparison: each in a process and a folder of its own, found again after an interruption."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from ..core.errors import ConfigError
from ..recipes.run_folder import RunFolder, read_json, write_json, write_text
from ..recipes.schema import Recipe

INTERRUPTED = frozenset({-2, -15, 130, 143})
"""Exit codes of a run that was told to stop (SIGINT, SIGTERM): not a failure of the run."""


REFUSED = 2
"""Exit code of `rlx` for the library's own errors."""

CONFIGURATION = ("ConfigError", "RecipeError")
"""Errors of a configuration that can't run, by the name a run records them with."""

CRASH = "crash.json"
"""Written to the folder of a run whose process ended without a summary."""

ENDED = ("finished", "failed")
"""States of a run that is not made again."""


@dataclass(frozen=True)
class Run:
    """A run in its folder, as far as it got.

    setting   what was run: host, plug-ins, profile, seed, package version
    records   its metrics, one per step
    summary   None while it has not ended
    failure   why it crashed, if it did
    """

    folder: Path
    setting: Mapping[str, Any]
    records: Sequence[Mapping[str, Any]]
    summary: Mapping[str, Any] | None
    failure: str | None

    @property
    def seed(self) -> int:
        return int(self.setting["seed"])

    @property
    def plugins(self) -> dict[str, Any]:
        return Recipe.model_validate(self.setting["recipe"]).in_profile(self.setting["profile"]).plugins


def read_run(folder: Path) -> Run:
    """The run in a folder; ConfigError when there is none."""
    files = RunFolder(folder)
    try:
        setting = read_json(files.recipe)
        summary = read_json(files.summary) if files.summary.exists() else None
        why = _failure(folder)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"{folder}: not the folder of a run: {error}") from None
    missing = {"recipe", "profile", "seed"} - set(setting)
    if missing:
        raise ConfigError(f"{files.recipe}: not the record of a run: it lacks {', '.join(sorted(missing))}")
    return Run(folder, setting, files.records(), summary, None if summary is not None else why)


def identity(setting: Mapping[str, Any]) -> dict[str, Any]:
    """What makes two runs the same run: host, plug-ins, the chosen profile without its notes, seed."""
    recipe = Recipe.model_validate(setting["recipe"]).in_profile(setting["profile"])
    chosen = recipe.profile(setting["profile"]).model_dump(mode="json", exclude={"notes", "plugins"})
    return {
        "host": recipe.host,
        "plugins": recipe.plugins,
        "profile": setting["profile"],
        "seed": setting["seed"],
        **chosen,
    }


@dataclass(frozen=True)
class Planned:
    """A run to be made: `recipe` with `seed` in `folder`."""

    arm: str
    recipe: Recipe
    profile: str
    seed: int
    folder: Path

    @property
    def label(self) -> str:
        return f"{self.arm} seed {self.seed}"

    @property
    def setting(self) -> dict[str, Any]:
        """What the run will record about itself; the recipe's other profiles, made for other hosts maybe, left out."""
        recipe = self.recipe.model_dump(mode="json")
        recipe["profiles"] = {self.profile: recipe["profiles"][self.profile]}
        return {"recipe": recipe, "profile": self.profile, "seed": self.seed}

    def state(self) -> str:
        """absent | half | finished | failed | running; ConfigError when the folder holds another run."""
        files = RunFolder(self.folder)
        if _locked(self.folder):
            return "running"
        if not files.recipe.exists():
            return "failed" if _failure(self.folder) else "absent"
        self._check_same()
        if files.summary.exists():
            return "finished"
        return "failed" if _failure(self.folder) else "half"

    def _check_same(self) -> None:
        wanted = json.loads(json.dumps(identity(self.setting)))
        try:
            there = identity(read_json(RunFolder(self.folder).recipe))
        except (ValidationError, ConfigError, ValueError, KeyError):
            there = {}
        other = [key for key in wanted if wanted[key] != there.get(key)]
        if other:
            what = "; ".join(f"{key}: {there.get(key)!r} there, {wanted[key]!r} wanted" for key in other)
            raise ConfigError(f"{self.folder} holds another run ({what}); use another --output")

    def command(self) -> list[str]:
        """The `rlx run` of this run; one with a checkpoint goes on from it."""
        words = ["run", str(self.recipe_file), "--profile", self.profile, "--seed", str(self.seed)]
        words += ["--output", str(self.folder)]
        started = RunFolder(self.folder).recipe.exists()
        checkpoints = RunFolder(self.folder).checkpoints
        if started:
            half = checkpoints.is_dir() and any(checkpoints.iterdir())
            words.append("--resume" if half else "--overwrite")
        return [sys.executable, "-m", "rlx_plugins.cli", *words]

    @property
    def recipe_file(self) -> Path:
        return self.folder.parent / "recipe.yaml"

    def read(self) -> Run:
        """The run as far as it got; one that crashed before it wrote anything has no metrics."""
        if RunFolder(self.folder).recipe.exists():
            return read_run(self.folder)
        return Run(self.folder, self.setting, [], None, _failure(self.folder))

    def write_recipe(self) -> None:
        """Write what is run to the arm's folder, so that the runs do not depend on a file that is edited meanwhile."""
        self.recipe_file.parent.mkdir(parents=True, exist_ok=True)
        write_text(self.recipe_file, yaml.safe_dump(self.setting["recipe"], sort_keys=False))

    def start(self, environment: Mapping[str, str]) -> Running:
        """Start the process; it holds the folder's lock as long as it lives, even if we die."""
        command = self.command()
        with _open_lock(self.folder) as lock, (self.folder / "run.log").open("ab") as log:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=[lock.fileno()],
                env=dict(environment),
            )
        return Running(self, process)


@dataclass
class Running:
    """A run in its process."""

    planned: Planned
    process: subprocess.Popen[bytes]

    def ended(self) -> bool:
        """Whether it has ended; a crash is recorded in its folder.

        Raises ConfigError when the run was refused: so will be the arm's others.
        """
        code = self.process.poll()
        if code is None:
            return False
        if code in INTERRUPTED:
            raise KeyboardInterrupt
        if code == 0 or RunFolder(self.planned.folder).summary.exists():
            return True
        said = _said(self.planned.folder)
        if code == REFUSED and (said is None or said.startswith(CONFIGURATION)):
            raise ConfigError(f"{self.planned.label} was refused: {said or self._last_words()}")
        message = f"exit code {code}: {said or self._last_words()}"
        write_json(self.planned.folder / CRASH, {"exit_code": code, "message": message[:500]})
        return True

    def _last_words(self) -> str:
        text = (self.planned.folder / "run.log").read_text(errors="replace").split("\n")
        lines = [line.strip() for line in text if line.strip()]
        errors = [line for line in lines if line.startswith("error: ")]
        return (errors or lines or ["it said nothing"])[-1]


def execute(runs: Sequence[Planned], *, jobs: int, tell: Callable[[str], None], pause: float = 0.2) -> None:
    """Make the runs that are missing, `jobs` at a time, in the given order; finished and failed ones stay.

    A run that a killed comparison left running is waited for. Ctrl-C stops the runs in progress; they can be resumed.
    """
    environment = {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // jobs)), **os.environ}
    waiting: list[Planned] = []
    orphans: list[Planned] = []
    running: list[Running] = []
    for planned in runs:
        state = planned.state()
        if state in ENDED:
            tell(f"{planned.label}: {state} before")
        else:
            (orphans if state == "running" else waiting).append(planned)
    for planned in orphans:
        tell(f"{planned.label}: still running since an earlier call")
    try:
        while waiting or running or orphans:
            for ended in [r for r in running if r.ended()]:
                running.remove(ended)
                tell(f"{ended.planned.label}: {ended.planned.state()}")
            for planned in [p for p in orphans if not _locked(p.folder)]:
                orphans.remove(planned)
                if (state := planned.state()) in ENDED:
                    tell(f"{planned.label}: {state}")
                else:
                    waiting.insert(0, planned)
            while waiting and len(running) + len(orphans) < jobs:
                planned = waiting.pop(0)
                tell(f"{planned.label}: {'resumed' if planned.state() == 'half' else 'started'}")
                running.append(planned.start(environment))
            if running or orphans:
                time.sleep(pause)
    finally:
        for r in running:
            r.process.terminate()
        for r in running:
            r.process.wait()


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold a folder against a second comparison that would run in it."""
    with _open_lock(folder) as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ConfigError(f"another comparison is running in {folder}") from None
        yield


def _open_lock(folder: Path) -> Any:
    folder.mkdir(parents=True, exist_ok=True)
    return (folder / ".lock").open("w")


def _locked(folder: Path) -> bool:
    if not (folder / ".lock").exists():
        return False
    with (folder / ".lock").open() as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return True
    return False


def _failure(folder: Path) -> str | None:
    """Why the run in a folder crashed: as we saw its process end, or as it said itself.

    None if it has not: an interruption and a refused configuration are no crash of the method.
    """
    if (folder / CRASH).exists():
        return str(read_json(folder / CRASH)["message"])
    said = _said(folder)
    return None if said is None or said.startswith(("KeyboardInterrupt", "SystemExit", *CONFIGURATION)) else said


def _said(folder: Path) -> str | None:
    """The error that the run recorded before it ended."""
    path = RunFolder(folder).failure
    return str(read_json(path)["error"]) if path.exists() else None
