"""Recipes as jobs of a real Slurm: they train, fail, are cancelled, requeued and resumed, alone and on two nodes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap

import pytest
from slurm_cluster import wait

import rlx_plugins as rlx
from rlx_plugins.recipes.run_folder import RunFolder, read_json
from rlx_plugins.slurm.status import statuses

pytest.importorskip("trl")


def log(folder):
    return (folder / "slurm" / "log.txt").read_text()


def state_of(folder):
    (run,) = statuses([folder])
    return run.state


def test_an_array_of_seeds_trains_each_in_its_folder(slurm, recipe, tmp_path):
    folder = tmp_path / "all seeds"
    command = [sys.executable, "-m", "rlx_plugins.cli", "slurm", recipe, "--array", "seeds=0-1", "--partition", "cpu"]
    command += ["--env-setup", "export PROBE='from set-up'", "--env-setup", 'echo "$PROBE"', "--python", sys.executable]
    done = subprocess.run([*command, "--output", folder, "--submit"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    job = done.stdout.split()[1].strip(":")
    for seed in (0, 1):
        ended = slurm.wait_for(f"{job}_{seed}", "COMPLETED", "FAILED")
        run = RunFolder(folder / f"seed-{seed}")
        assert ended["JobState"] == "COMPLETED", log(run.path)
        assert read_json(run.recipe)["seed"] == seed
        assert [r["step"] for r in run.records()] == [1, 2, 3]
        assert "from set-up" in log(run.path)
    losses = [[r["loss"] for r in RunFolder(folder / f"seed-{seed}").records()] for seed in (0, 1)]
    assert losses[0] != losses[1]
    shown = subprocess.run(
        [sys.executable, "-m", "rlx_plugins.cli", "status", folder, "--json"], capture_output=True, text=True
    )
    runs = json.loads(shown.stdout)
    assert [(r["job"], r["state"], r["step"], r["of"]) for r in runs] == [
        (f"{job}_0", "finished", 3, 3),
        (f"{job}_1", "finished", 3, 3),
    ]


def test_a_job_told_of_its_time_limit_is_requeued_and_goes_on_from_its_last_checkpoint(slurm, start):
    job, folder = start("max_steps=200", "save_steps=20", "save_total_limit=2")
    checkpoints = RunFolder(folder).checkpoints
    wait(lambda: any(checkpoints.glob("checkpoint-*/rlx_plugins.pt")), "a checkpoint", 120)
    assert state_of(folder) == "running"
    subprocess.run(["scancel", "--signal=USR1", "--batch", job], check=True)  # as Slurm does before the limit
    wait(lambda: slurm.job(job)["Restarts"] == "1", "the job to be requeued")
    assert "requeued and will go on from its last checkpoint" in log(folder)
    ended = slurm.wait_for(job, "COMPLETED", "FAILED")
    assert ended["JobState"] == "COMPLETED", log(folder)
    steps = [json.loads(line)["step"] for line in RunFolder(folder).metrics.read_text().splitlines()]
    assert steps.count(1) == 1  # the second start did not begin again
    assert [r["step"] for r in RunFolder(folder).records()] == list(range(1, 201))
    assert state_of(folder) == "finished"


def test_a_preempted_job_resumes_whatever_its_first_start_was_told(slurm, start, python):
    code = 'echo "called with $*"; if [[ "$*" == *--resume* ]]; then exit 0; fi; sleep 60'
    job, folder = start(python=python(code), overwrite=True)
    wait(lambda: (folder / "slurm" / "log.txt").exists() and "--overwrite" in log(folder), "the first start")
    subprocess.run(["scontrol", "requeue", job], check=True)
    wait(lambda: slurm.job(job)["JobState"] == "PENDING", "the requeue")
    assert state_of(folder) == "pending"
    assert slurm.wait_for(job, "COMPLETED", "FAILED")["JobState"] == "COMPLETED"
    assert ["--resume" in line for line in log(folder).splitlines() if "called with" in line] == [False, True]


def test_without_a_checkpoint_the_time_limit_does_not_requeue_and_a_cancelled_job_is_cancelled(slurm, start, python):
    job, folder = start(python=python("echo started; sleep 60"))
    wait(lambda: (folder / "slurm" / "log.txt").exists() and "started" in log(folder), "the start")
    subprocess.run(["scancel", "--signal=USR1", "--batch", job], check=True)
    wait(lambda: "not requeued" in log(folder), "the script's answer")
    assert slurm.job(job)["JobState"] == "RUNNING"
    with pytest.raises(rlx.ConfigError, match=f"belongs to job {job}, which is running"):
        start()
    subprocess.run(["scancel", job], check=True)
    assert slurm.wait_for(job, "CANCELLED")["Restarts"] == "0"
    assert state_of(folder) == "cancelled"


def test_a_failed_run_ends_its_job_with_its_exit_code_and_says_why(slurm, start):
    job, folder = start("learning_rat=1")
    ended = slurm.wait_for(job, "FAILED", "COMPLETED")
    assert (ended["JobState"], ended["ExitCode"]) == ("FAILED", "2:0")
    assert "TRL has no argument 'learning_rat'; did you mean 'learning_rate'" in " ".join(log(folder).split())
    (run,) = statuses([folder])
    assert run.state == "failed" and "learning_rat" in run.note


def test_what_slurm_refuses_is_told_and_leaves_no_job(slurm, start, tmp_path):
    with pytest.raises(rlx.ConfigError, match=r"no partition 'spar'; did you mean 'spare'.*\(it has cpu, spare\)"):
        start(partition="cpu,spar")
    assert not (tmp_path / "run").exists()
    with pytest.raises(rlx.RLXError, match="(?s)sbatch refuses .*Requested node configuration is not available"):
        start(nodes=2, gpus_per_node=9)
    assert slurm.ask("squeue", "--noheader") == ""


def test_one_run_on_two_nodes_writes_its_metrics_once(slurm, start):
    job, folder = start(nodes=2, deepspeed="zero2" if has_deepspeed() else None)
    ended = slurm.wait_for(job, "COMPLETED", "FAILED")
    assert ended["JobState"] == "COMPLETED", log(folder)
    assert (ended["NumNodes"], ended["ExitCode"]) == ("2", "0:0")
    lines = [json.loads(line) for line in RunFolder(folder).metrics.read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3]
    tokens = [line["generated_tokens"] for line in lines]
    assert tokens[0] > 8 * 10 * 0.5 and tokens == sorted(tokens)
    assert log(folder).count("reward first") == 1


def has_deepspeed():
    try:
        import deepspeed  # noqa: F401
    except ImportError:
        return False
    return True


@pytest.fixture
def ray_driver(tmp_path, python):
    """Makes an interpreter that runs Python code in the place of `rlx run`; `address` is the cluster's."""

    def make(code: str) -> str:
        driver = tmp_path / "driver.py"
        driver.write_text("import sys, os, signal, time, ray\naddress = sys.argv[1]\n" + textwrap.dedent(code))
        return python(
            f"""if [[ "$2" == rlx_plugins.hosts.verl.cluster ]]; then
    exec {sys.executable} -m "$2" "$3" "$4" {driver} "$3"
fi
exec {sys.executable} "$@\""""
        )

    return make


def rays_of_this_job(folder):
    """Ray's processes that were started by a job with this run folder."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            command = open(f"/proc/{pid}/cmdline").read()
            if "raylet" in command or "gcs_server" in command:
                found += [pid] if str(folder) in open(f"/proc/{pid}/environ").read() else []
        except OSError:
            continue
    return found


def test_verls_driver_starts_when_both_nodes_have_joined_and_its_end_ends_them(slurm, start, ray_driver):
    pytest.importorskip("ray")
    code = """
        ray.init(address=address)
        where = ray.remote(num_gpus=1)(lambda: ray.get_runtime_context().get_node_id())
        print("nodes", len(set(ray.get([where.remote() for _ in range(2)]))), flush=True)
        sys.exit(3)
    """
    job, folder = start(host="verl", nodes=2, gpus_per_node=1, python=ray_driver(code))
    ended = slurm.wait_for(job, "COMPLETED", "FAILED")
    assert (ended["JobState"], ended["ExitCode"]) == ("FAILED", "3:0"), log(folder)
    assert "2 of 2 nodes have joined" in log(folder) and "nodes 2" in log(folder)
    assert rays_of_this_job(folder) == []


def test_a_ray_node_that_fails_ends_the_job(slurm, start, ray_driver):
    pytest.importorskip("ray")
    code = """
        ray.init(address=address)
        mine = ray.get_runtime_context().get_node_id()
        other = next(node["NodeID"] for node in ray.nodes() if node["NodeID"] != mine)
        there = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(other, soft=False)
        kill = ray.remote(max_retries=0)(lambda: os.kill(os.getppid(), signal.SIGKILL))
        kill.options(scheduling_strategy=there).remote()
        time.sleep(300)
    """
    job, folder = start(host="verl", nodes=2, gpus_per_node=1, python=ray_driver(code))
    ended = slurm.wait_for(job, "COMPLETED", "FAILED")
    assert ended["JobState"] == "FAILED", log(folder)
    assert "A Ray node ended while the training ran" in log(folder)
    assert rays_of_this_job(folder) == []
