"""`rlx run` as a user runs it: a recipe trained in processes of their own, killed, resumed, refused."""

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

from rlx_plugins.recipes.run_folder import RunFolder

ROOT = Path(__file__).parents[2]
SMALL = ["max_steps=6", "per_device_train_batch_size=8", "num_generations=4", "save_strategy=steps", "save_steps=2"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """An untrained model in the folder of a trained one: the tiny lane's own takes a minute to warm up."""
    from rlx_plugins.testing.tiny_model import build_tiny_model, build_tiny_tokenizer

    folder = tmp_path_factory.mktemp("model")
    tokenizer = build_tiny_tokenizer()
    build_tiny_model(tokenizer, hidden_size=32, layers=2, intermediate_size=64, heads=2).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def start(model, output, *words):
    command = [sys.executable, "-m", "rlx_plugins.cli", "run", str(ROOT / "recipes" / "quickstart.yaml")]
    command += [f"model={model}", *SMALL, "--output", str(output), *words]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200", "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)


def finish(process):
    output = process.communicate(timeout=280)[0]
    return process.returncode, output


def test_a_recipe_runs_and_a_killed_run_resumed_is_the_run(model, tmp_path):
    whole, cut = start(model, tmp_path / "whole"), start(model, tmp_path / "cut")
    folder = RunFolder(tmp_path / "cut")
    while not (folder.checkpoints / "checkpoint-4" / "rlx_plugins.pt").exists():
        assert cut.poll() is None, finish(cut)[1]
        time.sleep(0.05)
    cut.send_signal(signal.SIGKILL)
    finish(cut)
    assert not folder.summary.exists()

    code, output = finish(whole)
    assert code == 0, output
    assert "reward first" in output and "accuracy before" in output
    assert (tmp_path / "whole" / "curves.png").exists()

    code, output = finish(start(model, tmp_path / "cut", "--resume"))
    assert code == 0, output
    expected = {r["step"]: r["loss"] for r in RunFolder(tmp_path / "whole").records()}
    resumed = {r["step"]: r["loss"] for r in folder.records()}
    assert len(expected) == 3  # two updates per generation; the reward is logged with the first
    assert resumed == pytest.approx(expected, abs=1e-7)
    tokens = [json.loads(p.read_text())["tokens"] for p in (folder.summary, tmp_path / "whole" / "summary.json")]
    assert tokens[0] == tokens[1]

    code, output = finish(start(model, tmp_path / "whole"))
    assert code == 2 and "already holds a run" in output


def test_an_argument_trl_does_not_have_is_refused_by_name(model, tmp_path):
    code, output = finish(start(model, tmp_path / "run", "learning_rat=1e-4"))
    assert code == 2
    assert "TRL has no argument 'learning_rat'; did you mean 'learning_rate'" in output
