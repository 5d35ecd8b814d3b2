"""A Slurm cluster of its own on this machine: munge, a controller, two nodes with two fictitious GPUs each."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

PROGRAMS = ("slurmctld", "slurmd", "sbatch", "srun", "munged", "mungekey")
PACKAGES = ("slurmctld", "slurmd", "slurm-client", "munge")
NODES = 2
PARTITIONS = ("cpu", "spare")

CONFIGURATION = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge.sock,cred_expire=5
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_interval=1,batch_sched_delay=1
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
KillWait=20
MinJobAge=3600
ReturnToService=2
GresTypes=gpu
SlurmdParameters=config_overrides
NodeName=node[1-{nodes}] NodeHostname={host} NodeAddr=127.0.0.1 Port=[{ports[1]}-{ports[2]}] CPUs=8 Gres=gpu:2
PartitionName=cpu Nodes=ALL Default=YES MaxTime=60
PartitionName=spare Nodes=ALL MaxTime=60
"""


class Unavailable(Exception):
    """Why there can be no cluster here."""


def install() -> None:
    """Install Slurm from the distribution's packages if it is missing. Raises Unavailable."""
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    if not missing:
        return
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        raise Unavailable(f"{', '.join(missing)} missing, and no right or no apt-get to install {', '.join(PACKAGES)}")
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    for command in (["update"], ["install", "--yes", "--no-install-recommends", *PACKAGES]):
        done = subprocess.run(["apt-get", *command], env=environment, capture_output=True, text=True, timeout=300)
        if done.returncode != 0:
            raise Unavailable(f"apt-get {command[0]} ended with {done.returncode}: {done.stderr.strip()[-300:]}")


@dataclass
class Cluster:
    """The daemons, the environment in which commands reach them, and what tests ask of Slurm."""

    folder: Path
    daemons: list[subprocess.Popen] = field(default_factory=list)

    @property
    def environment(self) -> dict[str, str]:
        return {**os.environ, "SLURM_CONF": str(self.folder / "slurm.conf")}

    def start(self) -> None:
        """Start munge, the controller and the nodes. Raises Unavailable when they do not come up."""
        if os.geteuid() != 0:
            raise Unavailable("the daemons of a Slurm cluster are started as root")
        (self.folder / "state").mkdir(parents=True)
        host = socket.gethostname().partition(".")[0]
        text = CONFIGURATION.format(host=host, folder=self.folder, ports=free_ports(1 + NODES), nodes=NODES)
        (self.folder / "slurm.conf").write_text(text)
        (self.folder / "gres.conf").write_text("Name=gpu File=/dev/null\nName=gpu File=/dev/zero\n")
        key = self.folder / "munge.key"
        subprocess.run(["mungekey", "--create", f"--keyfile={key}"], check=True)
        files = {"socket": "munge.sock", "pid-file": "munge.pid", "log-file": "munge.log", "seed-file": "munge.seed"}
        self._start("munged", "--foreground", "--force", f"--key-file={key}", *(
            f"--{option}={self.folder / name}" for option, name in files.items()
        ))  # fmt: skip
        wait(lambda: (self.folder / "munge.sock").exists(), "munge")
        self._start("slurmctld", "-D", "-c")
        for node in range(1, 1 + NODES):
            self._start("slurmd", "-D", "-N", f"node{node}")
        wait(lambda: self.ask("sinfo", "--noheader", "--format=%t", "--partition=cpu") == "idle", "the nodes")

    def _start(self, *command: str) -> None:
        with (self.folder / "daemons.log").open("a") as log:
            self.daemons.append(subprocess.Popen(command, env=self.environment, stdout=log, stderr=log))

    def stop(self) -> None:
        """Cancel all jobs and end the daemons."""
        subprocess.run(["scancel", "--user=root"], env=self.environment, capture_output=True)
        try:
            wait(lambda: self.ask("squeue", "--noheader") == "", "the jobs to end")
        finally:
            for daemon in reversed(self.daemons):
                daemon.terminate()
            for daemon in reversed(self.daemons):
                daemon.wait(timeout=30)

    def ask(self, *command: str) -> str:
        """The output of one of Slurm's commands."""
        done = subprocess.run(command, env=self.environment, capture_output=True, text=True, timeout=60)
        return done.stdout.strip()

    def job(self, job: str) -> dict[str, str]:
        """What the controller knows of a job: JobState, ExitCode, Restarts, ..."""
        words = self.ask("scontrol", "--oneliner", "show", "job", job).split()
        return dict(word.partition("=")[::2] for word in words)

    def wait_for(self, job: str, *states: str, timeout: float = 240) -> dict[str, str]:
        """Wait until a job is in one of the states; returns what the controller knows of it."""
        wait(lambda: self.job(job).get("JobState") in states, f"job {job} to be {' or '.join(states)}", timeout)
        return self.job(job)

    def logs(self) -> str:
        """The end of the daemons' logs."""
        return "\n".join(f"{p.name}\n{p.read_text(errors='replace')[-2000:]}" for p in self.folder.glob("*.log"))


def free_ports(count: int) -> list[int]:
    """Consecutive TCP ports that nothing listens on."""
    for first in range(20000, 60000, 50):
        try:
            for port in range(first, first + count):
                with socket.socket() as s:
                    s.bind(("127.0.0.1", port))
        except OSError:
            continue
        return list(range(first, first + count))
    raise Unavailable("no free ports")


def wait(condition: Callable[[], bool], what: str, timeout: float = 60) -> None:
    """Wait until `condition` holds; TimeoutError says what was waited for."""
    deadline = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {timeout:.0f} s for {what}")
        time.sleep(0.2)
