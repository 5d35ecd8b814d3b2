from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("trl")

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
HELPERS = ROOT / "tests" / "hosts" / "trl"
sys.path.insert(0, str(HELPERS))


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    """Path of an untrained tiny model."""
    from trl_tiny import save_tiny_model

    return save_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def script():
    """Runs a script of this folder in processes of its own; returns the exit status of the launcher."""

    def run(name: str, *arguments: object, ranks: int = 1) -> int:
        launcher = [sys.executable]
        if ranks > 1:
            launcher += ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)]
        paths = os.pathsep.join([str(ROOT), str(HELPERS)])
        environment = {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "TRL_EXPERIMENTAL_SILENCE": "1"}
        command = [*launcher, str(HERE / name), *map(str, arguments)]
        done = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, timeout=280)
        if done.returncode not in (0, -9):
            output = f"{done.stdout[-3000:]}\n{done.stderr[-5000:]}"
            pytest.fail(f"{command} ended with {done.returncode}:\n{output}")
        return done.returncode

    return run
