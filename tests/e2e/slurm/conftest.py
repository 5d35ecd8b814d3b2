"""A real Slurm: its daemons run on this machine for the session of the tests."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
sys.path.insert(0, str(HERE))

from slurm_cluster import Cluster, Unavailable, install  # noqa: E402

from rlx_plugins.slurm.job import make_job  # noqa: E402
from rlx_plugins.slurm.submit import submit  # noqa: E402

RECIPE = """\
name: sample
title: A sample
host: [trl, verl]
plugins: {advantage: grpo, clip: ppo}
profiles:
  tiny:
    task: small_task:task
    rewards: [digits]
    arguments:
      trl:
        max_steps: 3
        per_device_train_batch_size: 8
        num_generations: 4
        max_completion_length: 10
        use_cpu: true
        bf16: false
        save_strategy: steps
        save_steps: 1
      verl: {}
"""


@pytest.fixture(scope="session")
def cluster(tmp_path_factory):
    """Two nodes on this machine; the tests are skipped where Slurm can be neither found nor installed."""
    cluster = Cluster(tmp_path_factory.mktemp("slurm"))
    try:
        install()
    except Unavailable as reason:
        pytest.skip(f"no Slurm: {reason}")
    try:
        cluster.start()
    except TimeoutError as reason:
        pytest.fail(f"{reason}\n{cluster.logs()}")
    yield cluster
    cluster.stop()


@pytest.fixture
def slurm(cluster, monkeypatch):
    """The cluster as this process and the jobs it submits see it."""
    environment = {
        "SLURM_CONF": cluster.environment["SLURM_CONF"],
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(HERE)]),
        "OMP_NUM_THREADS": "1",
        "TRL_EXPERIMENTAL_SILENCE": "1",
    }
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    return cluster


@pytest.fixture(scope="session")
def recipe(tmp_path_factory):
    """A recipe of three steps on an untrained model, in a folder with the model."""
    from rlx_plugins.testing.tiny_model import build_tiny_model, build_tiny_tokenizer

    folder = tmp_path_factory.mktemp("recipe")
    tokenizer = build_tiny_tokenizer()
    build_tiny_model(tokenizer, hidden_size=32, layers=2, intermediate_size=64, heads=2).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    path = folder / "sample.yaml"
    path.write_text(f"{RECIPE}    model: {folder}\n")
    return path


@pytest.fixture
def start(slurm, recipe, tmp_path):
    """Submits the recipe with options of `make_job`; returns the job's id and its run folder."""

    def submit_job(*overrides: str, output: str = "run", **options):
        job = make_job(recipe, overrides, output=tmp_path / output, **options)
        return submit(job), job.folder

    return submit_job


@pytest.fixture
def python(tmp_path):
    """Makes an interpreter that runs bash code in the place of `rlx run`, whose arguments are `$@`."""

    def make(code: str) -> str:
        path = tmp_path / "python"
        path.write_text(f"#!/bin/bash\n{code}\n")
        path.chmod(0o755)
        return str(path)

    return make
