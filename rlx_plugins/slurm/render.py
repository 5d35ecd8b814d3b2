"""The sbatch script of a job."""

from __future__ import annotations

import shlex
from typing import Any

from ..core.errors import ConfigError
from .job import JOB_FOLDER, Job

try:
    import jinja2
except ImportError as missing:
    raise ConfigError(f"rlx slurm needs the package {missing.name!r}: pip install 'rlx-plugins[cli]'") from None

SIGNAL_BEFORE = 120
"""Seconds before the time limit at which a job that may be requeued is told; Slurm may do so a minute earlier."""

LOG = f"{JOB_FOLDER}/log.txt"
"""The job's output, in the run folder."""

FIRST_START = {"refused": "", "resumed": "--resume", "replaced": "--overwrite"}
"""What `rlx run` is told about a run that the folder holds."""


def render(job: Job) -> str:
    """The job as a script for sbatch. Every value that a person chose is quoted, but the lines of `env_setup`."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader(__package__, "."),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["quote"] = lambda value: shlex.quote(str(value))
    values = {
        "job": job,
        "title": " ".join(job.recipe.title.split()),
        "directives": directives(job),
        "first_start": FIRST_START[job.existing],
        "srun_options": srun_options(job),
        **(verl_values(job) if job.recipe.host == "verl" else trl_values(job)),
    }
    return environment.get_template(f"{job.recipe.host}.sh.j2").render(values)


def directives(job: Job) -> list[str]:
    """The options of sbatch, in the grammar of #SBATCH lines."""
    folder = str(job.folder).replace("%", "%%") + ("/seed-%a" if job.seeds else "")
    options: dict[str, Any] = {
        "job-name": f"rlx-{job.recipe.name}",
        "nodes": job.nodes,
        "ntasks-per-node": 1,
        "gpus-per-node": job.gpus_per_node,
        "cpus-per-task": job.cpus_per_task,
        "mem": job.mem,
        "time": job.time,
        "partition": job.partition,
        "account": job.account,
        "qos": job.qos,
        "dependency": job.dependency,
        "array": job.seeds.text if job.seeds else None,
        "chdir": directive_value(str(job.workdir)),
        "output": directive_value(f"{folder}/{LOG}"),
        "open-mode": "append",
        "signal": f"B:USR1@{SIGNAL_BEFORE}" if job.requeue else None,
    }
    lines = [f"--{name}={value}" for name, value in options.items() if value is not None]
    return [*lines, "--requeue" if job.requeue else "--no-requeue"]


def directive_value(text: str) -> str:
    """A value in a #SBATCH line: within double quotes, which blanks and # need and $ does not mind."""
    return '"' + text.replace('"', '\\"') + '"'


def srun_options(job: Job) -> str:
    """A task on each node, with all that the job has there; a task that fails ends the others."""
    cpus = "" if job.cpus_per_task is None else f" --cpus-per-task={job.cpus_per_task}"
    return f"--ntasks={job.nodes} --ntasks-per-node=1{cpus} --kill-on-bad-exit=1"


def trl_values(job: Job) -> dict[str, Any]:
    """What the TRL script needs beside the job: TRL's arguments that the job sets."""
    file = job.deepspeed_file()
    return {"host_overrides": [] if file is None else [shlex.quote(f"deepspeed={file}")]}


def verl_values(job: Job) -> dict[str, Any]:
    """What the verl script needs beside the job: verl's arguments that the job sets, and how Ray is started.

    A tiny run has its training processes on CPUs, as many as Ray is told of fictitious GPUs.
    """
    tiny = job.profile == "tiny"
    overrides, environment, ray_options = [], {}, '--num-cpus="$SLURM_CPUS_ON_NODE"'
    if job.nodes > 1 or job.gpus_per_node is not None:
        overrides = [f"trainer.nnodes={job.nodes}", f"trainer.n_gpus_per_node={job.processes_per_node}"]
    if job.nodes > 1:
        overrides.append('++ray_kwargs.ray_init.address="$address:$port"')
    elif not tiny:
        overrides.append('ray_kwargs.ray_init.num_cpus="$SLURM_CPUS_ON_NODE"')
    if tiny:
        from ..hosts.verl.cpu import cpu_environment

        environment = cpu_environment()
        ray_options = f"--num-cpus=32 --num-gpus={job.processes_per_node} --object-store-memory=300000000"
    return {"host_overrides": overrides, "environment": environment, "ray_options": ray_options}
