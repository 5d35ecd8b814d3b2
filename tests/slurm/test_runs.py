"""What jobs rely on in a run's folder: one writer among several processes, a trace of failure, resuming elsewhere."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

import rlx_plugins as rlx
from rlx_plugins.recipes import runner
from rlx_plugins.recipes.run_folder import RunFolder, read_json
from rlx_plugins.recipes.schema import load, with_overrides


@pytest.fixture
def host(monkeypatch):
    """The training of every host; `host.fails` with an error to raise."""
    fake = SimpleNamespace(fails=None)

    def train(recipe, profile, folder, **options):
        if fake.fails:
            raise fake.fails
        return {}

    monkeypatch.setattr(runner, "host_module", lambda name: SimpleNamespace(train=train))
    return fake


def files(folder):
    return {path.name for path in folder.path.iterdir()}


def test_of_several_processes_the_main_one_writes(host, recipe, tmp_path, monkeypatch):
    folder = RunFolder.open(tmp_path / "run")
    monkeypatch.setenv("RANK", "1")
    runner.run(load(recipe), folder)
    host.fails = rlx.RLXError("another rank told why")
    with pytest.raises(rlx.RLXError):
        runner.run(load(recipe), folder)
    assert files(folder) == set()
    host.fails = None
    monkeypatch.setenv("RANK", "0")
    runner.run(load(recipe), folder)
    assert files(folder) == {"recipe.json", "summary.json", "curves.png"}


def test_a_failure_is_noted_until_the_next_start(host, recipe, tmp_path):
    folder = RunFolder.open(tmp_path / "run")
    host.fails = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        runner.run(load(recipe), folder)
    assert read_json(folder.failure) == {"error": "KeyboardInterrupt: "} and not folder.summary.exists()
    host.fails = None
    runner.run(load(recipe), folder, resume=True)
    assert not folder.failure.exists() and folder.summary.exists()


def test_a_replaced_run_leaves_no_checkpoint_to_resume_from(tmp_path):
    folder = RunFolder.open(tmp_path / "run")
    (folder.checkpoints / "checkpoint-9").mkdir(parents=True)
    assert (RunFolder.open(tmp_path / "run", resume=True).checkpoints / "checkpoint-9").exists()
    assert not RunFolder.open(tmp_path / "run", overwrite=True).checkpoints.exists()


def test_a_verl_run_is_resumed_where_the_job_finds_its_nodes(host, recipe, tmp_path):
    folder = RunFolder.open(tmp_path / "run")
    for resume, address in [(False, "10.0.0.1:10012"), (True, "10.0.0.7:10012")]:
        words = ["trainer.nnodes=2", f"++ray_kwargs.ray_init.address={address}"]
        runner.run(with_overrides(load(recipe, host="verl"), words, "tiny"), folder, resume=resume)
    with pytest.raises(rlx.ConfigError, match=r"trainer\.nnodes was 2, now 4"):
        runner.run(with_overrides(load(recipe, host="verl"), ["trainer.nnodes=4"], "tiny"), folder, resume=True)
