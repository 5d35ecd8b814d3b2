"""`rlx compare` as a user runs it: two recipes on two seeds, killed with all its runs, continued."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("trl")

from rlx_plugins.recipes.run_folder import RunFolder, read_json

ROOT = Path(__file__).parents[2]
SMALL = ["per_device_train_batch_size=8", "num_generations=4", "save_strategy=steps", "save_steps=1"]
SMALL += ["num_iterations=1", "max_steps=2"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """An untrained model in the folder of a trained one."""
    from rlx_plugins.testing.tiny_model import build_tiny_model, build_tiny_tokenizer

    folder = tmp_path_factory.mktemp("model")
    tokenizer = build_tiny_tokenizer()
    build_tiny_model(tokenizer, hidden_size=32, layers=2, intermediate_size=64, heads=2).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def start(model, output, *words):
    recipe = ROOT / "recipes" / "quickstart.yaml"
    command = [sys.executable, "-m", "rlx_plugins.cli", "compare", f"plain={recipe}:plugins=none", f"own={recipe}"]
    command += [option for word in [f"model={model}", *SMALL] for option in ("--set", word)]
    command += ["--seeds", "2", "--jobs", "2", "--output", str(output), *words]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200", "PYTHONPATH": path()}
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment, start_new_session=True
    )


def path():
    return os.pathsep.join(p for p in (str(ROOT), os.environ.get("PYTHONPATH", "")) if p)


def test_a_killed_comparison_goes_on_where_it_stopped(model, tmp_path):
    output = tmp_path / "compared"
    killed = start(model, output)
    checkpoint = RunFolder(output / "plain" / "seed-0").checkpoints / "checkpoint-1" / "trainer_state.json"
    while not checkpoint.exists():
        assert killed.poll() is None, killed.communicate()[0]
        time.sleep(0.05)
    os.killpg(killed.pid, signal.SIGKILL)
    killed.communicate()
    assert not (output / "report.md").exists()

    continued = start(model, output, "--resume")
    said = continued.communicate(timeout=800)[0]
    assert continued.returncode == 0, said
    assert "plain seed 0: resumed" in said or "plain seed 0: finished before" in said
    assert (output / "report.md").exists() and (output / "report.html").exists()

    results = json.loads((output / "results.json").read_text())
    assert (results["seeds"], results["dropped"], results["metrics"][0]) == ([0, 1], [], "accuracy")
    assert all(match["weights"] and match["same"] == match["steps"] == 2 for match in results["matches"])
    assert len(results["matches"]) == 2
    for arm in ("plain", "own"):
        for seed in (0, 1):
            folder = RunFolder(output / arm / f"seed-{seed}")
            assert [r["step"] for r in folder.records()] == [1, 2]
            assert read_json(folder.recipe)["seed"] == seed
