"""What `rlx slurm` refuses before Slurm sees it."""

from __future__ import annotations

import pytest

import rlx_plugins as rlx
from rlx_plugins.slurm.job import Seeds


@pytest.mark.parametrize(
    ("text", "seeds"),
    [
        ("seeds=0-4", [0, 1, 2, 3, 4]),
        ("seeds=7", [7]),
        ("seeds=0,2,5", [0, 2, 5]),
        ("seeds=0-8:4,20", [0, 4, 8, 20]),
        ("seeds=1-3%2", [1, 2, 3]),
    ],
)
def test_seeds_are_read_in_slurms_notation(text, seeds):
    assert list(Seeds.parse(text)) == seeds


@pytest.mark.parametrize(
    "text",
    ["0-4", "seed=0-4", "seeds=", "seeds=4-", "seeds=a", "seeds=0-4%0", "seeds=0-4:0", "seeds=0 1", "seeds=0-4\n"],
)
def test_a_malformed_array_is_refused_with_the_accepted_forms(text):
    with pytest.raises(rlx.ConfigError, match=r"expected seeds=0-4, seeds=0,2,5"):
        Seeds.parse(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("seeds=4-0", "a range ends before it starts"),
        ("seeds=7,4-0", "a range ends before it starts"),
        ("seeds=0-999999999", "1000000000 runs in one job"),
    ],
)
def test_an_array_of_no_runs_or_of_too_many_is_refused(text, message):
    with pytest.raises(rlx.ConfigError, match=message):
        Seeds.parse(text)


@pytest.mark.parametrize("time", ["30", "30:00", "12:00:00", "2-0", "2-00:30", "2-00:30:15", "UNLIMITED"])
def test_slurms_times_are_accepted(job, time):
    assert job(time=time).time == time


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("time", "2h", "--time '2h': expected minutes, minutes:seconds"),
        ("time", "1:2:3:4", "--time"),
        ("time", "1\n#SBATCH --uid=0", "--time"),
        ("partition", "gpu;rm", "--partition 'gpu;rm': expected names"),
        ("partition", "gpu\n", "--partition"),
        ("account", "$(id)", "--account"),
        ("mem", "64 GB", "--mem '64 GB': expected a number with K, M, G or T"),
        ("dependency", "after ok", "--dependency"),
        ("nodes", 0, "--nodes 0: expected at least 1"),
        ("gpus_per_node", 0, "--gpus-per-node 0: expected at least 1"),
        ("cpus_per_task", 0, "--cpus-per-task 0"),
        ("seed", -1, "--seed -1"),
    ],
)
def test_an_option_that_slurm_could_not_read_is_refused(job, option, value, message):
    with pytest.raises(rlx.ConfigError, match=message.replace("$(", r"\$\(")):
        job(**{option: value})


@pytest.mark.parametrize("dependency", ["afterok:12", "afterok:12:13,afterany:14", "afterok:1?afterok:2", "singleton"])
def test_slurms_dependencies_are_accepted(job, dependency):
    assert job(dependency=dependency).dependency == dependency


@pytest.mark.parametrize("name", ["a\nb", "a\\b"])
def test_a_folder_that_no_sbatch_line_can_name_is_refused(job, tmp_path, name):
    with pytest.raises(rlx.ConfigError, match="the run folder .*: Slurm takes no backslash or control character"):
        job(output=tmp_path / name)


def test_set_up_lines_that_leave_a_quote_open_are_refused(job):
    with pytest.raises(rlx.ConfigError, match="--env-setup is not shell code: .*unexpected EOF"):
        job(env_setup=("module load cuda", "echo 'open"))


def test_seed_and_array_or_resume_and_overwrite_exclude_each_other(job):
    with pytest.raises(rlx.ConfigError, match="--seed and --array"):
        job(seed=1, array="seeds=0-1")
    with pytest.raises(rlx.ConfigError, match="--resume and --overwrite"):
        job(resume=True, overwrite=True)


def test_a_bad_override_is_refused_as_by_rlx_run(job):
    with pytest.raises(rlx.ConfigError, match="unknown clip 'pppo'; did you mean 'ppo'"):
        job("clip=pppo")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"deepspeed": "zero2"}, "shards over several processes"),
        ({"deepspeed": "zeroo3", "nodes": 2}, r"no such file; did you mean 'zero3'"),
        ({"deepspeed": "zero2", "nodes": 2, "host": "verl"}, "is for host trl"),
    ],
)
def test_deepspeed_that_can_not_work_is_refused(job, options, message):
    with pytest.raises(rlx.ConfigError, match=message):
        job(**options)


def test_a_deepspeed_file_that_is_not_json_is_refused(job, tmp_path):
    (tmp_path / "ds.json").write_text("{")
    with pytest.raises(rlx.ConfigError, match="can't be read as JSON"):
        job(deepspeed=str(tmp_path / "ds.json"), nodes=2)


def test_deepspeed_given_twice_is_refused(job):
    with pytest.raises(rlx.ConfigError, match="say the same thing"):
        job("deepspeed=mine.json", deepspeed="zero2", nodes=2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"nodes": 2, "cpus_per_task": 8}, "verl on 2 nodes: --gpus-per-node is missing"),
        ({"gpus_per_node": 4, "cpus_per_task": 12}, "--cpus-per-task 12: verl reserves 3 CPUs for each.*at least 13"),
        ({"gpus_per_node": 4}, "--cpus-per-task is missing: .*at least 13"),
    ],
)
def test_resources_with_which_verl_would_wait_for_ever_are_refused(job, options, message):
    with pytest.raises(rlx.ConfigError, match=message):
        job(host="verl", profile="paper", **options)


@pytest.mark.parametrize("word", ["trainer.nnodes=2", "++ray_kwargs.ray_init.address=x"])
def test_overrides_of_what_the_job_sets_are_refused(job, word):
    with pytest.raises(rlx.ConfigError, match="leave it to --nodes and --gpus-per-node"):
        job(word, host="verl")
