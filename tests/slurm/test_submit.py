"""A job's files, and what happens when Slurm or the folder says no."""

from __future__ import annotations

import importlib.util

import pytest

import rlx_plugins as rlx
from rlx_plugins.recipes.run_folder import RunFolder, write_json
from rlx_plugins.recipes.schema import load, with_overrides
from rlx_plugins.slurm.submit import submit, warnings, write

SBATCH = 'echo "$2" > "${0%/*}/submitted"; echo "12;cluster"'


def test_a_job_is_written_beside_the_recipe_as_it_is_now(job, recipe, tmp_path):
    script = write(job("clip=ppo", host="verl"))
    assert script == tmp_path / "run" / "slurm" / "job.sh"
    frozen = tmp_path / "run" / "slurm" / "recipe.yaml"
    assert str(frozen) in script.read_text() and str(recipe) not in script.read_text()
    recipe.write_text(recipe.read_text().replace("grpo", "rloo"))
    again = with_overrides(load(frozen), ["clip=ppo"], "tiny")
    assert (again.host, again.plugins) == ("verl", {"advantage": "grpo", "clip": "ppo"})
    assert "--host" not in script.read_text()


def test_a_frozen_recipe_needs_no_base(job, recipe, tmp_path):
    own = tmp_path / "own.yaml"
    own.write_text("extends: sample.yaml\nname: own\nplugins: {clip: {name: ppo, eps_high: 0.3}}\n")
    write(job(recipe=own))
    recipe.unlink()
    frozen = load(tmp_path / "run" / "slurm" / "recipe.yaml")
    assert frozen.plugins == {"advantage": "grpo", "clip": {"name": "ppo", "eps_high": 0.3}}
    assert frozen.profile("paper").model == "some/model"


def test_submit_hands_the_script_to_sbatch_and_notes_the_id(job, slurm, tmp_path):
    slurm(sbatch=SBATCH)
    assert submit(job()) == "12"
    assert (tmp_path / "slurm programs" / "submitted").read_text() == f"{tmp_path}/run/slurm/job.sh\n"
    assert (tmp_path / "run" / "slurm" / "job").read_text() == "12\n"


def test_each_run_of_an_array_has_a_folder_for_its_log_and_its_id(job, slurm, tmp_path):
    slurm(sbatch=SBATCH)
    submit(job(array="seeds=0,3"))
    assert {p.parent.parent.name: p.read_text() for p in tmp_path.glob("run/*/slurm/job")} == {
        "seed-0": "12_0\n",
        "seed-3": "12_3\n",
    }


def test_without_sbatch_submitting_is_refused_and_nothing_written(job, slurm, tmp_path):
    with pytest.raises(rlx.ConfigError, match="sbatch is not on the PATH"):
        submit(job())
    assert not (tmp_path / "run").exists()


def test_an_unknown_partition_is_named_with_those_there_are(job, slurm, tmp_path):
    slurm(sbatch=SBATCH, sinfo="echo gpu; echo gpu-long; echo cpu")
    with pytest.raises(
        rlx.ConfigError, match=r"no partition 'gpuu'; did you mean 'gpu'.*\(it has cpu, gpu, gpu-long\)"
    ):
        submit(job(partition="cpu,gpuu"))
    assert not (tmp_path / "run").exists()
    assert submit(job(partition="cpu,gpu")) == "12"


def test_without_an_answer_from_sinfo_the_partition_is_sbatchs_business(job, slurm):
    slurm(sbatch="echo 'sbatch: error: invalid partition specified: x' >&2; exit 1", sinfo="exit 1")
    with pytest.raises(rlx.RLXError, match=r"(?s)sbatch refuses .*job\.sh:.*invalid partition specified: x"):
        submit(job(partition="x"))


def test_a_refused_submission_notes_no_job(job, slurm, tmp_path):
    slurm(sbatch="exit 1")
    with pytest.raises(rlx.RLXError):
        submit(job())
    assert not (tmp_path / "run" / "slurm" / "job").exists()


def hold_a_run(path):
    folder = RunFolder.open(path)
    write_json(folder.recipe, {})
    folder.log({"step": 1, "reward": 0.5})
    return folder


def test_a_folder_that_holds_another_run_is_refused_unless_resumed_or_replaced(job, tmp_path):
    folder = hold_a_run(tmp_path / "run")
    with pytest.raises(rlx.ConfigError, match="already holds a run; use --resume, --overwrite"):
        write(job())
    write(job(resume=True))
    write(job(overwrite=True))
    assert len(folder.records()) == 1  # replaced when the job starts, not when it is written


def test_one_run_of_an_array_that_is_there_refuses_all(job, tmp_path):
    hold_a_run(tmp_path / "run" / "seed-2")
    with pytest.raises(rlx.ConfigError, match="seed-2 already holds a run"):
        write(job(array="seeds=0-4"))


def test_a_folder_that_can_not_be_written_is_refused(job, tmp_path):
    (tmp_path / "run").write_text("")
    with pytest.raises(rlx.ConfigError, match="can't be written"):
        write(job())


@pytest.mark.parametrize("given", [{}, {"resume": True}, {"overwrite": True}])
def test_a_folder_whose_job_slurm_still_has_is_refused(job, slurm, given):
    slurm(sbatch=SBATCH, squeue="echo '12|PENDING|Priority'")
    submit(job())
    with pytest.raises(rlx.ConfigError, match="belongs to job 12, which is pending: scancel it first"):
        submit(job(**given))


def test_a_folder_whose_job_has_ended_is_free(job, slurm):
    slurm(sbatch=SBATCH, squeue="echo '12|CANCELLED|None'")
    submit(job())
    assert submit(job()) == "12"


def test_a_host_that_is_not_installed_here_is_worth_a_warning_only(job, monkeypatch):
    assert warnings(job()) == []
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "verl" else find(name, *rest))
    (told,) = warnings(job(host="verl"))
    assert "host verl is not installed here" in told and "pip install 'rlx-plugins[verl]'" in told


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"overrides": ("save_strategy=no",)}, "writes no checkpoints"),
        ({"overrides": ("trainer.save_freq=-1",), "host": "verl"}, "writes no checkpoints"),
        ({"profile": "paper"}, "no GPU is requested"),
    ],
)
def test_what_is_probably_not_meant_is_worth_a_warning(job, options, message):
    assert message in " ".join(warnings(job(*options.pop("overrides", ()), **options)))
