"""verl runs in processes of their own, without an accelerator."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

pytest.importorskip("verl")

from rlx_plugins.hosts.verl.cpu import cpu_environment, cpu_overrides
from rlx_plugins.hosts.verl.cpu.tiny import tiny_files
from rlx_plugins.testing.tiny_model import tiny_model_path

ROOT = Path(__file__).parents[3]


@dataclass
class Run:
    """How a run ended, what it printed, and verl's metrics of each step."""

    status: int
    output: str
    steps: dict[int, dict[str, float]]

    def column(self, metric: str) -> list[float]:
        """One metric of all steps, in order."""
        return [self.steps[step][metric] for step in sorted(self.steps)]


def has_vllm() -> bool:
    try:
        return version("vllm").endswith("+cpu")
    except PackageNotFoundError:
        return False


@pytest.fixture(scope="session")
def verl_inputs():
    """The tiny model and the files of the tiny task: built on first use, kept in the cache."""
    train, held_out = tiny_files()
    return {"model": tiny_model_path(), "train_files": train, "val_files": held_out}


@pytest.fixture
def verl_run(verl_inputs, tmp_path_factory):
    """Runs verl; returns a ``Run``, which must have ended well unless it was killed.

    Keywords are those of ``cpu_overrides``. ``module`` is started with ``python -m``. With ``kill_after`` all processes
    are killed with SIGKILL as soon as verl has reported that step. ``environment`` comes on top of ``cpu_environment``.
    """

    def run(
        *extra: str,
        module: str = "verl.trainer.main_ppo",
        kill_after: int | None = None,
        timeout: float = 600,
        environment: dict[str, str] | None = None,
        **settings,
    ) -> Run:
        if settings.get("replica") == "vllm" and not has_vllm():
            pytest.skip("vLLM's CPU build is not installed: make install-verl-cpu")
        folder = tmp_path_factory.mktemp("run")
        metrics, log = folder / "metrics.jsonl", folder / "log.txt"
        overrides = cpu_overrides(
            **{**verl_inputs, **settings}, extra=["trainer.logger=[file]", f"hydra.run.dir={folder}", *extra]
        )
        variables = {key: value for key, value in os.environ.items() if key != "RAY_ADDRESS"}
        variables |= {"PYTHONPATH": str(ROOT), "VERL_USE_EXTERNAL_MODULES": "rlx_plugins.hosts.verl.plugin"}
        variables |= {"VERL_FILE_LOGGER_PATH": str(metrics), **cpu_environment(), **(environment or {})}
        command = [sys.executable, "-m", module, *overrides]
        with log.open("w") as output:
            process = subprocess.Popen(
                command, env=variables, cwd=folder, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
            )
            try:
                killed = _wait(process, metrics, kill_after, timeout)
            finally:
                _kill(process)
        result = Run(process.returncode, log.read_text(), _steps(metrics))
        if result.status != (-signal.SIGKILL if killed else 0):
            pytest.fail(f"{module} ended with {result.status}:\n{result.output[-8000:]}")
        return result

    return run


def _steps(metrics: Path) -> dict[int, dict[str, float]]:
    lines = metrics.read_text().splitlines() if metrics.exists() else []
    return {row["step"]: row["data"] for row in map(json.loads, lines)}


def _wait(process: subprocess.Popen, metrics: Path, kill_after: int | None, timeout: float) -> bool:
    """Whether the run was killed on purpose, rather than ending by itself."""
    deadline = time.monotonic() + timeout
    while process.poll() is None:
        if kill_after is not None and kill_after in _steps(metrics):
            _kill(process)
            return True
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return False


def _kill(process: subprocess.Popen) -> None:
    """Kills the launcher and everything it started; Ray's own processes go with it."""
    import psutil

    try:
        started = psutil.Process(process.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        started = []
    process.kill()
    for child in started:
        try:
            child.kill()
        except psutil.NoSuchProcess:
            pass
    process.wait()
