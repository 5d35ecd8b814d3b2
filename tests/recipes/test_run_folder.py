"""The folder of a run: refuses to mix runs, survives a killed one."""

import json
import math
import os

import pytest

import rlx_plugins as rlx
from rlx_plugins.recipes.curves import plot, smoothed
from rlx_plugins.recipes.run_folder import RunFolder, read_json, summarise, write_json


def test_a_folder_that_holds_a_run_is_refused_unless_told_otherwise(tmp_path):
    folder = RunFolder.open(tmp_path / "run")
    write_json(folder.recipe, {})
    folder.log({"step": 1, "reward": 0.5})
    with pytest.raises(rlx.ConfigError, match="already holds a run; use --resume, --overwrite"):
        RunFolder.open(tmp_path / "run")
    assert len(RunFolder.open(tmp_path / "run", resume=True).records()) == 1
    assert RunFolder.open(tmp_path / "run", overwrite=True).records() == []


def test_a_start_that_failed_before_its_first_step_does_not_hold_the_folder(tmp_path):
    folder = RunFolder.open(tmp_path)
    write_json(folder.recipe, {})
    write_json(folder.failure, {"error": "ConfigError: TRL has no argument 'max_stepss'"})
    RunFolder.open(tmp_path)
    folder.log({"step": 1, "reward": 0.5})
    with pytest.raises(rlx.ConfigError, match="already holds a run"):
        RunFolder.open(tmp_path)


def test_a_checkpoint_without_metrics_holds_the_folder(tmp_path):
    folder = RunFolder.open(tmp_path)
    write_json(folder.recipe, {})
    write_json(folder.failure, {"error": "..."})
    (folder.checkpoints / "checkpoint-1").mkdir(parents=True)
    with pytest.raises(rlx.ConfigError, match="already holds a run"):
        RunFolder.open(tmp_path)


def test_resume_and_overwrite_exclude_each_other(tmp_path):
    with pytest.raises(rlx.ConfigError, match="--resume and --overwrite exclude each other"):
        RunFolder.open(tmp_path, resume=True, overwrite=True)


def test_a_folder_that_can_not_be_written_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(rlx.ConfigError, match="can't be written"):
        RunFolder.open(tmp_path / "file" / "run")


def test_a_resumed_step_replaces_the_interrupted_one_and_a_torn_line_is_skipped(tmp_path):
    folder = RunFolder.open(tmp_path)
    for step, reward in [(1, 0.1), (2, 0.2), (3, 0.3)]:
        folder.log({"step": step, "reward": reward})
    folder.metrics.write_text(folder.metrics.read_text() + '{"step": 4, "rew')
    folder.metrics.open("a").write("\n")
    folder.log({"step": 3, "reward": 0.7})
    assert [(r["step"], r["reward"]) for r in folder.records()] == [(1, 0.1), (2, 0.2), (3, 0.7)]


def test_numbers_that_are_not_finite_are_null_in_the_metrics(tmp_path):
    folder = RunFolder.open(tmp_path)
    folder.log({"step": 1, "reward": math.nan})
    assert json.loads(folder.metrics.read_text())["reward"] is None


def test_a_json_file_is_written_whole_or_not_at_all(tmp_path):
    path = tmp_path / "summary.json"
    write_json(path, {"a": 1})
    with pytest.raises(TypeError):
        write_json(path, {"a": object()})
    assert read_json(path) == {"a": 1}
    assert os.listdir(tmp_path) == ["summary.json"]


def test_the_summary_compares_the_first_and_the_last_steps():
    records = [{"step": i, "reward": float(i), "generated_tokens": 10 * i, "seconds": 0.5 * i} for i in range(1, 31)]
    s = summarise(records)
    assert (s["steps"], s["reward_first"], s["reward_last"], s["tokens"], s["seconds"]) == (30, 2.0, 29.0, 300, 15.0)
    assert summarise([])["reward_first"] is None


def test_curves_are_drawn_for_runs_with_and_without_records(tmp_path):
    plot({"a": [{"step": 1, "reward": 0.5}, {"step": 2, "reward": None}], "b": []}, tmp_path / "c.png")
    assert (tmp_path / "c.png").stat().st_size > 1000


def test_smoothing_starts_at_the_first_value():
    assert smoothed([2.0, 2.0, 2.0]) == pytest.approx([2.0] * 3)
    assert smoothed([1.0, 3.0], decay=0.5) == pytest.approx([1.0, 7 / 3])
