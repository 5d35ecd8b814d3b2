"""Jobs of a recipe written for the test, and programs that stand in for Slurm's."""

from __future__ import annotations

import os

import pytest

from rlx_plugins.slurm.job import make_job

RECIPE = """\
name: sample
title: A sample
host: [trl, verl]
plugins: {advantage: grpo}
profiles:
  tiny:
    arguments:
      trl: {max_steps: 3, save_strategy: steps, save_steps: 1}
      verl: {trainer.save_freq: 1}
  paper:
    model: some/model
    arguments: {trl: {max_steps: 3}, verl: {}}
"""


@pytest.fixture
def recipe(tmp_path):
    """A recipe file for both hosts."""
    path = tmp_path / "sample.yaml"
    path.write_text(RECIPE)
    return path


@pytest.fixture
def job(recipe, tmp_path):
    """Makes the job of the recipe with options of `make_job`; its run folder is `run`."""

    def make(*overrides: str, **options):
        return make_job(options.pop("recipe", recipe), overrides, **{"output": tmp_path / "run", **options})

    return make


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    """`slurm(squeue="...", ...)`: programs with the given bash code on a PATH of nothing else but the system's."""
    programs = tmp_path / "slurm programs"
    programs.mkdir()
    monkeypatch.setenv("PATH", f"{programs}:{system_programs(tmp_path)}")

    def install(**codes: str) -> None:
        for name, code in codes.items():
            (programs / name).write_text(f"#!/bin/bash\n{code}\n")
            (programs / name).chmod(0o755)

    return install


def system_programs(folder):
    """A folder with what the stand-ins need, and no Slurm even where one is installed."""
    path = folder / "system programs"
    path.mkdir()
    for name in ("bash", "cat", "sleep"):
        found = next(f"{p}/{name}" for p in os.environ["PATH"].split(":") if os.path.exists(f"{p}/{name}"))
        (path / name).symlink_to(found)
    return path
