"""What Slurm says about jobs."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

ACTIVE = ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "SUSPENDED", "REQUEUED", "REQUEUE_HOLD", "RESIZING")
"""States of jobs that run or will run."""

ANSWER_TIMEOUT = 60.0
"""Seconds that a command of Slurm has to answer."""


@dataclass(frozen=True)
class JobState:
    """A job's state in Slurm's words (PENDING, RUNNING, COMPLETED, FAILED, ...) and the reason Slurm gives for it."""

    state: str
    reason: str = ""


def job_states(ids: Iterable[str]) -> dict[str, JobState]:
    """States of the jobs that Slurm knows, by id (`12`, of an array `12_3`): from squeue, of older jobs from sacct.

    Empty without Slurm, or when it does not answer.
    """
    wanted = sorted(set(ids))
    states = _ask(["squeue", "--noheader", "--array", "--states=all", "--format=%i|%T|%r"], wanted)
    older = [job for job in wanted if job not in states]
    states |= _ask(["sacct", "--noheader", "--parsable2", "--allocations", "--format=JobID,State,Reason"], older)
    return {job: states[job] for job in wanted if job in states}


def _ask(command: Sequence[str], ids: Sequence[str]) -> dict[str, JobState]:
    """Lines `id|state|reason` of a command that takes --jobs."""
    if not ids:
        return {}
    arrays = sorted({job.partition("_")[0] for job in ids})
    text = _output([*command, f"--jobs={','.join(arrays)}"]) or ""
    rows = [line.strip().split("|") for line in text.splitlines() if line.count("|") == 2]
    # "CANCELLED by 1000"
    return {job: JobState(state.split()[0], "" if reason == "None" else reason) for job, state, reason in rows if state}


def partitions() -> list[str] | None:
    """The partitions of the cluster; None when Slurm can't be asked."""
    text = _output(["sinfo", "--all", "--noheader", "--format=%R"])
    return None if text is None else sorted(set(text.split()))


def _output(command: Sequence[str]) -> str | None:
    """What a command prints; None if it is not there, fails, or does not answer."""
    if shutil.which(command[0]) is None:
        return None
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=ANSWER_TIMEOUT)
    except subprocess.TimeoutExpired:
        return None
    return done.stdout if done.returncode == 0 else None
