"""The files of a job in its run folder, and its submission."""

from __future__ import annotations

import dataclasses
import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

import yaml

from ..core.errors import ConfigError, RLXError, close_matches
from ..recipes.run_folder import RunFolder, write_text
from ..recipes.schema import Recipe
from .job import JOB_FOLDER, Job, recorded_job
from .queue import ACTIVE, job_states, partitions
from .render import LOG, render


def write(job: Job) -> Path:
    """Write the job's script into its folder, beside the recipe as it is now: later edits do not reach the job.

    Raises ConfigError when a run folder can't be written, holds another run that is neither resumed nor replaced, or
    belongs to a job that Slurm still has.
    """
    folders = job.run_folders()
    _refuse_active(folders)
    for path in folders:
        RunFolder.open(path, resume=job.existing != "refused")
        (path / JOB_FOLDER).mkdir(exist_ok=True)
    own = job.folder / JOB_FOLDER
    own.mkdir(exist_ok=True)
    text = recipe_text(job.source)
    alone = Recipe.model_validate(yaml.safe_load(text))  # for the one host that was chosen
    frozen = dataclasses.replace(job, source=alone, recipe_file=own / "recipe.yaml")
    write_text(frozen.recipe_file, text)
    script = own / "job.sh"
    write_text(script, render(frozen))
    return script


def submit(job: Job) -> str:
    """Write the job and hand it to sbatch; returns the job's id, which is noted in the run folders."""
    if shutil.which("sbatch") is None:
        raise ConfigError("--submit: sbatch is not on the PATH; write the script with `rlx slurm` and submit it there")
    known = partitions()
    for name in job.partition.split(",") if job.partition and known else []:
        if name not in known:
            near = close_matches(name, known)
            raise ConfigError(f"--partition: Slurm has no partition {name!r}{near} (it has {', '.join(known)})")
    script = write(job)
    done = subprocess.run(["sbatch", "--parsable", str(script)], capture_output=True, text=True)
    if done.returncode != 0:
        raise RLXError(f"sbatch refuses {script}:\n{done.stderr.strip()}")
    print(done.stderr, end="", file=sys.stderr)  # what the cluster has to say beside the job's id
    job_id = done.stdout.strip().partition(";")[0]
    for seed, path in zip(job.seeds or [None], job.run_folders()):
        write_text(path / JOB_FOLDER / "job", f"{job_id}\n" if seed is None else f"{job_id}_{seed}\n")
    return job_id


def log_pattern(job: Job) -> str:
    """Where the job's output goes; %a is the seed."""
    return str(job.folder / ("seed-%a" if job.seeds else "") / LOG)


def recipe_text(recipe: Recipe) -> str:
    """A recipe as YAML with nothing left to look up in other files."""
    data = recipe.model_dump(mode="json", exclude_defaults=True)
    return yaml.safe_dump(data, sort_keys=False, allow_unicode=True, width=120)


def _refuse_active(folders: list[Path]) -> None:
    jobs = {job: path for path in folders if (job := recorded_job(path)) is not None}
    for job, found in job_states(jobs).items():
        if found.state in ACTIVE:
            raise ConfigError(
                f"{jobs[job]} belongs to job {job}, which is {found.state.lower()}: scancel it first, or choose another"
                " --output"
            )


def warnings(job: Job) -> list[str]:
    """What may be meant, but deserves a word: a host that is not installed here, a run that can't be resumed."""
    host, out = job.recipe.host, []
    if importlib.util.find_spec(host) is None:
        out.append(f"host {host} is not installed here; the job needs it: pip install 'rlx-plugins[{host}]'")
    if job.profile != "tiny" and job.gpus_per_node is None:
        out.append(f"no GPU is requested for profile {job.profile}: --gpus-per-node")
    if job.requeue and not saves_checkpoints(job):
        remedy = "save_strategy=steps save_steps=N" if host == "trl" else "trainer.save_freq=N"
        out.append(f"the run writes no checkpoints: requeued, it starts over ({remedy})")
    return out


def saves_checkpoints(job: Job) -> bool:
    """Whether the run writes checkpoints while it trains."""
    profile = job.recipe.profile(job.profile)
    tiny_task = isinstance(profile.task, str) and profile.task.startswith("tiny")
    if job.recipe.host == "trl":
        return profile.arguments.get("save_strategy", "no" if tiny_task else "steps") != "no"
    from ..hosts.verl.run import flatten

    default = 1 if job.profile == "tiny" else -1  # verl saves none unless told; a tiny run is told by its host module
    return flatten(profile.arguments).get("trainer.save_freq", default) > 0
