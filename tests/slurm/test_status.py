"""The state of runs: by Slurm where it knows the job, else by what the folder shows."""

from __future__ import annotations

import json
import os
import time

import pytest

import rlx_plugins as rlx
from rlx_plugins.recipes.run_folder import RunFolder, write_json
from rlx_plugins.slurm import queue
from rlx_plugins.slurm.queue import JobState, job_states
from rlx_plugins.slurm.status import STALLED_AFTER, find_runs, statuses


def run_folder(path, *, steps=0, finished=False, failed=None, age=0.0, job=None, seconds=1.0):
    """A run folder whose files were written `age` seconds ago."""
    folder = RunFolder.open(path, resume=True)
    written = []
    if job is not None:
        (path / "slurm").mkdir(exist_ok=True)
        (path / "slurm" / "job").write_text(f"{job}\n")
    if steps or finished or failed:
        write_json(folder.recipe, {})
        written.append(folder.recipe)
    for step in range(1, steps + 1):
        folder.log({"step": step, "max_steps": 10, "reward": step / 10, "seconds": step * seconds})
        written.append(folder.metrics)
    if finished:
        write_json(folder.summary, {})
        written.append(folder.summary)
    if failed:
        write_json(folder.failure, {"error": failed})
    for i, file in enumerate(dict.fromkeys(written)):
        os.utime(file, (time.time() - age - 10 + i,) * 2)
    return folder


def state(path, **options):
    run_folder(path, **options)
    (found,) = statuses([path])
    return found.state


def test_without_slurm_the_folder_tells(tmp_path, slurm):
    assert state(tmp_path / "a", steps=3) == "running"
    assert state(tmp_path / "b", steps=3, age=STALLED_AFTER + 60) == "stalled"
    assert state(tmp_path / "c", steps=3, age=STALLED_AFTER + 60, seconds=100) == "running"  # its steps are that long
    assert state(tmp_path / "d", steps=3, finished=True, age=9999) == "finished"
    assert state(tmp_path / "e", steps=3, failed="RLXError: no GPU") == "failed"
    assert state(tmp_path / "f", job=12) == "not started"
    assert [run.note for run in statuses([tmp_path / "e"])] == ["RLXError: no GPU"]
    assert state(tmp_path / "g", steps=3, failed="KeyboardInterrupt: ") == "failed"
    assert [run.note for run in statuses([tmp_path / "g"])] == ["interrupted"]


def test_a_finished_run_that_goes_on_is_running(tmp_path, slurm):
    folder = run_folder(tmp_path / "run", steps=3, finished=True)
    folder.log({"step": 4, "max_steps": 10, "reward": 0.4, "seconds": 4.0})
    assert statuses([tmp_path / "run"])[0].state == "running"


def test_the_last_metrics_are_those_of_the_last_complete_line(tmp_path, slurm):
    folder = run_folder(tmp_path / "run", steps=3)
    with folder.metrics.open("a") as f:
        f.write('{"step": 4, "rew')
    (run,) = statuses([tmp_path / "run"])
    assert (run.step, run.of, run.reward, run.seconds, run.job) == (3, 10, 0.3, 3.0, None)
    assert 0 <= run.idle < 60


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("12|PENDING|Resources", ("pending", "Resources")),
        ("12|RUNNING|None", ("running", "")),
        ("12|COMPLETED|None", ("finished", "")),
        ("12|FAILED|NonZeroExitCode", ("failed", "NonZeroExitCode")),
        ("12|TIMEOUT|TimeLimit", ("timeout", "TimeLimit")),
        ("12|CANCELLED|None", ("cancelled", "")),
        ("12|OUT_OF_MEMORY|OutOfMemory", ("out of memory", "OutOfMemory")),
    ],
)
def test_slurm_tells_of_jobs_it_knows(tmp_path, slurm, line, expected):
    slurm(squeue=f"echo '{line}'")
    run_folder(tmp_path / "run", steps=3, job=12, age=9999)
    (run,) = statuses([tmp_path])
    assert (run.state, run.note) == expected and run.job == "12"


def test_why_a_failed_job_failed_is_what_the_run_said(tmp_path, slurm):
    slurm(squeue="echo '12|FAILED|NonZeroExitCode'")
    run_folder(tmp_path / "run", steps=1, job=12, failed="ConfigError: no argument 'learning_rat'")
    assert statuses([tmp_path])[0].note == "ConfigError: no argument 'learning_rat'"


def test_of_jobs_that_squeue_has_forgotten_sacct_tells(slurm):
    slurm(
        squeue='[[ "$*" == *--jobs=12,13* ]] && printf "13_1|RUNNING|None\\n13_2|PENDING|JobArrayTaskLimit\\n"',
        sacct='[[ "$*" == *--jobs=12 ]] && echo "12|CANCELLED by 1000|None"',
    )
    assert job_states(["12", "13_1", "13_2"]) == {
        "12": JobState("CANCELLED"),
        "13_1": JobState("RUNNING"),
        "13_2": JobState("PENDING", "JobArrayTaskLimit"),
    }


def test_a_slurm_that_does_not_answer_leaves_it_to_the_folder(tmp_path, slurm):
    slurm(squeue="echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1", sacct="exit 1")
    assert state(tmp_path / "run", steps=3, job=12) == "running"


def test_a_slurm_that_hangs_is_not_waited_for_for_ever(tmp_path, slurm, monkeypatch):
    monkeypatch.setattr(queue, "ANSWER_TIMEOUT", 0.1)
    slurm(squeue="exec sleep 5")
    assert state(tmp_path / "run", steps=3, job=12) == "running"


def test_runs_are_found_at_any_depth_and_nothing_within_them(tmp_path):
    run_folder(tmp_path / "one", steps=1)
    run_folder(tmp_path / "sweep" / "seed-0", steps=1)
    run_folder(tmp_path / "sweep" / "seed-1", job="12_1")
    run_folder(tmp_path / "one" / "checkpoints" / "copy", steps=1)
    (tmp_path / "sweep" / "slurm").mkdir()
    (tmp_path / "empty").mkdir()
    found = [str(p.relative_to(tmp_path)) for p in find_runs(tmp_path)]
    assert found == ["one", "sweep/seed-0", "sweep/seed-1"]


def test_a_run_named_twice_is_shown_once(tmp_path, slurm):
    run_folder(tmp_path / "one", steps=1)
    assert len(statuses([tmp_path, tmp_path / "one"])) == 1


def test_a_folder_that_is_not_there_is_named(tmp_path):
    with pytest.raises(rlx.ConfigError, match="missing: no such folder"):
        statuses([tmp_path / "missing"])


def test_the_command_shows_a_table_or_json(tmp_path, slurm, command):
    run_folder(tmp_path / "[red]one", steps=3, finished=True)
    code, table, _ = command("status", tmp_path)
    assert code == 0
    assert "[red]one" in table and "finished" in table and "3/10" in table
    (run,) = json.loads(command("status", tmp_path, "--json")[1])
    assert (run["state"], run["step"], run["of"], run["reward"]) == ("finished", 3, 10, 0.3)
