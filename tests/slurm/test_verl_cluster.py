"""verl in a Ray cluster that a job has started."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap

import pytest

import rlx_plugins as rlx
from rlx_plugins.hosts.verl import cluster
from rlx_plugins.hosts.verl.run import exit_on_sigterm, in_cluster


def test_a_run_in_a_cluster_does_not_size_it_and_tells_its_workers_the_environment():
    given = [
        "+ray_kwargs.ray_init.num_gpus=2",
        "ray_kwargs.ray_init.num_cpus=32",
        "+ray_kwargs.ray_init.include_dashboard=false",
        "++ray_kwargs.ray_init.address=10.0.0.1:10012",
        "trainer.nnodes=2",
    ]
    told = {"OMP_NUM_THREADS": "1", "VERL_FILE_LOGGER_PATH": '/runs/a "b"/metrics.jsonl'}
    assert in_cluster(given, told) == [
        "++ray_kwargs.ray_init.address=10.0.0.1:10012",
        "trainer.nnodes=2",
        '+ray_kwargs.ray_init.runtime_env.env_vars.OMP_NUM_THREADS="1"',
        r'+ray_kwargs.ray_init.runtime_env.env_vars.VERL_FILE_LOGGER_PATH="/runs/a \"b\"/metrics.jsonl"',
    ]


def test_sigterm_runs_what_a_run_has_to_clean_up():
    before = signal.getsignal(signal.SIGTERM)
    cleaned = []
    with pytest.raises(SystemExit) as end, exit_on_sigterm():
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            signal.pause()
        finally:
            cleaned.append(True)
    assert end.value.code == 143 and cleaned
    assert signal.getsignal(signal.SIGTERM) == before


@pytest.fixture
def nodes(monkeypatch):
    """A Ray whose nodes are those of a list, one entry a look."""
    looks: list[int | Exception] = []

    class Ray:
        @staticmethod
        def init(**options):
            if isinstance(looks[0], Exception):
                raise looks.pop(0)

        @staticmethod
        def nodes():
            alive = looks.pop(0) if len(looks) > 1 else looks[0]
            return [{"Alive": True}] * alive + [{"Alive": False}]

        @staticmethod
        def shutdown():
            looks.append(-1)

    monkeypatch.setitem(sys.modules, "ray", Ray)
    monkeypatch.setattr(cluster.time, "sleep", lambda seconds: None)
    return looks


def test_the_driver_waits_for_a_head_that_is_not_up_and_for_every_node(nodes, capsys):
    nodes += [ConnectionError("not yet"), 1, 1, 2]
    cluster.wait_for_nodes("10.0.0.1:1", 2)
    assert capsys.readouterr().out.splitlines() == [
        "0 of 2 nodes have joined the Ray cluster",
        "1 of 2 nodes have joined the Ray cluster",
        "2 of 2 nodes have joined the Ray cluster",
    ]
    assert nodes[-1] == -1  # disconnected


def test_nodes_that_do_not_come_are_counted_in_the_error(nodes):
    nodes.append(1)
    with pytest.raises(rlx.RLXError, match=r"after 0 s 1 of 3 nodes have joined the Ray cluster at 10\.0\.0\.1:1"):
        cluster.wait_for_nodes("10.0.0.1:1", 3, timeout=0.2)


def test_the_waiting_process_becomes_the_training(tmp_path):
    (tmp_path / "ray.py").write_text(
        textwrap.dedent("""
        def init(**options): pass
        def nodes(): return [{"Alive": True}] * 2
        def shutdown(): pass
        """)
    )
    command = [sys.executable, "-m", "rlx_plugins.hosts.verl.cluster", "10.0.0.1:1", "2", "-c", "raise SystemExit(7)"]
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{os.getcwd()}"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 7, done.stderr
