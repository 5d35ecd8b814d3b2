"""`rlx slurm` as a person types it."""

from __future__ import annotations

import pytest


def test_print_writes_the_script_and_nothing_else(command, recipe, tmp_path):
    folder = tmp_path / "run"
    code, out, err = command("slurm", recipe, "clip=ppo", "--print", "--nodes", 2, "--output", folder)
    assert code == 0 and err == ""
    assert out.startswith("#!/bin/bash\n") and "clip=ppo" in out and str(recipe) in out
    assert not folder.exists()


def test_without_submit_the_script_is_written_and_the_command_for_it_printed(command, recipe, tmp_path):
    code, out, _ = command("slurm", recipe, "--output", tmp_path / "a run", "--array", "seeds=0-1")
    assert code == 0
    assert out == f"sbatch '{tmp_path}/a run/slurm/job.sh'\n"
    assert (tmp_path / "a run" / "seed-1" / "slurm").is_dir()  # sbatch makes no folders for its logs


def test_submit_prints_the_jobs_id_and_its_log(command, recipe, tmp_path, slurm):
    slurm(sbatch="echo 12")
    code, out, _ = command("slurm", recipe, "--output", tmp_path / "run", "--submit")
    assert (code, out) == (0, f"job 12: {tmp_path}/run/slurm/log.txt\n")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--submit"], "sbatch is not on the PATH"),
        (["--submit", "--print"], "--print and --submit exclude each other"),
        (["--time", "2h"], "--time '2h': expected minutes"),
        (["--array", "0-4"], "--array '0-4': expected seeds=0-4"),
        (["clip=pppo"], "did you mean 'ppo'"),
        (["--profile", "large"], "no profile 'large'"),
        (["--host", "vllm"], "the recipe is for host trl and verl, not 'vllm'"),
    ],
)
def test_a_mistake_is_one_message_and_exit_code_2_and_writes_nothing(command, recipe, tmp_path, slurm, words, message):
    code, out, err = command("slurm", recipe, *words, "--output", tmp_path / "run")
    assert (code, out) == (2, "")
    assert message in err and "Traceback" not in err
    assert not (tmp_path / "run").exists()


def test_a_warning_does_not_disturb_the_script(command, recipe):
    code, out, err = command("slurm", recipe, "save_strategy=no", "--print")
    assert code == 0 and out.startswith("#!/bin/bash") and out.endswith('exit "$status"\n')
    assert err.startswith("warning: the run writes no checkpoints")
