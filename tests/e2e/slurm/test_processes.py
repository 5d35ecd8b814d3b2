"""`rlx run` in several processes, as the job's script launches it: one run folder, one voice."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from rlx_plugins.recipes.run_folder import RunFolder, read_json
from rlx_plugins.slurm.job import DEEPSPEED

pytest.importorskip("trl")

HERE = os.path.dirname(__file__)
ROOT = os.path.abspath(f"{HERE}/../../..")


def launch(recipe, folder, *words, program=("-m", "rlx_plugins.cli")):
    """(exit code, output) of two processes of `rlx run`."""
    command = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2"]
    command += ["--num_machines", "1", "--main_process_port", "0", "--mixed_precision", "no", "--dynamo_backend", "no"]
    command += [*program, "run", str(recipe), "--output", str(folder), *words]
    paths = os.pathsep.join([ROOT, HERE])
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
    return done.returncode, done.stdout + done.stderr


WORDS = ("task=tiny", "rewards=[accuracy,brevity]")


@pytest.fixture(scope="module")
def run(recipe, tmp_path_factory):
    """The folder of a run in two processes, and what they printed."""
    folder = RunFolder(tmp_path_factory.mktemp("processes") / "run")
    code, output = launch(recipe, folder.path, *WORDS)
    assert code == 0, output
    return folder, output


def test_two_processes_write_one_folder_and_print_once(run):
    folder, output = run
    assert len(folder.metrics.read_text().splitlines()) == 3
    assert output.count("reward first") == 1
    assert folder.curves.exists() and not folder.failure.exists()
    first = folder.records()[0]
    assert first["generated_tokens"] == pytest.approx(16 * first["completion_length"])  # both processes' eight rows


def test_a_folder_that_holds_a_run_is_refused_and_stays_as_it_was(run, recipe):
    folder, _ = run
    before = folder.metrics.read_text(), folder.recipe.read_text()
    code, output = launch(recipe, folder.path)
    assert code != 0 and "already holds a run" in output
    assert (folder.metrics.read_text(), folder.recipe.read_text()) == before and not folder.failure.exists()


def test_weights_in_parts_train_and_are_measured_like_whole_ones(run, recipe, tmp_path):
    pytest.importorskip("deepspeed")
    whole, sharded = run[0], RunFolder(tmp_path / "sharded")
    words = (*WORDS, f"deepspeed={DEEPSPEED['zero3']}")
    code, output = launch(recipe, sharded.path, *words, program=(f"{HERE}/sharded.py",))
    assert code == 0, output
    for ours, theirs in zip(sharded.records(), whole.records(), strict=True):
        assert ours["reward"] == pytest.approx(theirs["reward"], abs=1e-6)
        assert ours["loss"] == pytest.approx(theirs["loss"], abs=1e-5)
    for key in ("initial_weights", "accuracy_before", "accuracy_after"):
        assert read_json(sharded.summary)[key] == read_json(whole.summary)[key]
