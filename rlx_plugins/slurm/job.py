"""A Slurm job: a recipe, where it runs, and what is refused before Slurm sees it."""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ..core.errors import ConfigError, close_matches
from ..recipes.schema import Recipe, load, with_overrides

DEEPSPEED = {name: Path(__file__).parent / "deepspeed" / f"{name}.json" for name in ("zero2", "zero3")}
"""DeepSpeed configurations by name; sizes, precision and clipping are taken from TRL's arguments."""

JOB_FOLDER = "slurm"
"""Sub-folder of a run folder with what belongs to the job: script, recipe, job id, log."""

VERL_KEYS = ("trainer.nnodes", "trainer.n_gpus_per_node", "ray_kwargs.ray_init.address")
"""verl's arguments that the job sets."""

VERL_CPUS_PER_GPU = 3
"""CPUs that verl's resource pool reserves in Ray for each GPU."""

MAX_SEEDS = 10_000
"""Runs in an array; a cluster's own limit (MaxArraySize) is usually a thousand."""

_TIME = r"\d+(:\d\d?(:\d\d?)?)?|\d+-\d\d?(:\d\d?(:\d\d?)?)?|UNLIMITED|INFINITE"
_TIMES = "minutes, minutes:seconds, hours:minutes:seconds, days-hours, days-hours:minutes or days-hours:minutes:seconds"
_NAMES = r"[\w.@+-]+(,[\w.@+-]+)*"
_FORMS = {
    "partition": (_NAMES, "names separated by commas"),
    "account": (_NAMES, "a name"),
    "qos": (_NAMES, "a name"),
    "time": (_TIME, _TIMES),
    "mem": (r"\d+[KMGT]?", "a number with K, M, G or T; M without"),
    "dependency": (r"[a-z]+(:[\w+]+)*([,?][a-z]+(:[\w+]+)*)*", "such as afterok:1234 or singleton"),
}


@dataclass(frozen=True)
class Seeds:
    """The seeds of an array of runs in Slurm's notation: `0-4`, `0,2,5`, `0-8:2`, `0-99%4` (at most 4 at a time)."""

    text: str

    @classmethod
    def parse(cls, text: str) -> Seeds:
        """Read `seeds=0-4`; ConfigError when it is malformed or empty."""
        name, sign, range_text = text.partition("=")
        number = r"\d{1,9}"
        part = rf"{number}(-{number}(:[1-9]\d*)?)?"
        if name != "seeds" or not sign or not re.fullmatch(rf"{part}(,{part})*(%[1-9]\d*)?", range_text):
            raise ConfigError(f"--array {text!r}: expected seeds=0-4, seeds=0,2,5, seeds=0-8:2 or seeds=0-99%4")
        seeds = cls(range_text)
        sizes = [len(part) for part in seeds._ranges()]
        if not all(sizes):
            raise ConfigError(f"--array {text!r}: a range ends before it starts")
        if sum(sizes) > MAX_SEEDS:
            raise ConfigError(f"--array {text!r}: {sum(sizes)} runs in one job, at most {MAX_SEEDS} are accepted")
        return seeds

    def __iter__(self) -> Iterator[int]:
        yield from itertools.chain.from_iterable(self._ranges())

    def _ranges(self) -> Iterator[range]:
        for part in self.text.partition("%")[0].split(","):
            ends, _, step = part.partition(":")
            first, _, last = ends.partition("-")
            yield range(int(first), int(last or first) + 1, int(step or 1))


@dataclass(frozen=True, kw_only=True)
class Job:
    """A recipe as one Slurm job, or as an array of jobs that differ in their seed.

    source         the recipe as it was read; `recipe_file` is where the job reads it
    recipe         the same with `overrides` applied, which the job does again
    folder         run folder; of an array, the folder of the run folders `seed-K`
    existing       what the first start does with a run that the folder holds
    gpus_per_node  None requests none; TRL has a process for each, without GPUs one process a node
    deepspeed      zero2, zero3 or a file (TRL)
    env_setup      lines of shell code that the job runs first: modules, a virtual environment
    requeue        run again after preemption or shortly before the time limit, from the last checkpoint
    python         the interpreter that the job uses
    workdir        where the job runs; relative paths in the recipe start here

    The other fields are sbatch's options of that name. Raises ConfigError for what Slurm or the host could not use.
    """

    source: Recipe
    recipe: Recipe
    recipe_file: Path
    folder: Path
    overrides: tuple[str, ...] = ()
    profile: str = "tiny"
    seed: int = 0
    seeds: Seeds | None = None
    existing: Literal["refused", "resumed", "replaced"] = "refused"
    nodes: int = 1
    gpus_per_node: int | None = None
    cpus_per_task: int | None = None
    partition: str | None = None
    time: str | None = None
    account: str | None = None
    qos: str | None = None
    mem: str | None = None
    dependency: str | None = None
    deepspeed: str | None = None
    env_setup: tuple[str, ...] = ()
    requeue: bool = True
    python: str = sys.executable
    workdir: Path = Path()

    def __post_init__(self) -> None:
        for name, (form, expected) in _FORMS.items():
            value = getattr(self, name)
            if value is not None and not re.fullmatch(form, value, re.ASCII):
                raise ConfigError(f"--{name} {value!r}: expected {expected}")
        for name, least in (("nodes", 1), ("gpus_per_node", 1), ("cpus_per_task", 1), ("seed", 0)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ConfigError(f"--{name.replace('_', '-')} {value}: expected at least {least}")
        for what, path in (("run folder", self.folder), ("working folder", self.workdir)):
            if re.search(r"[\x00-\x1f\x7f\\]", str(path)):
                raise ConfigError(f"the {what} {str(path)!r}: Slurm takes no backslash or control character there")
        _check_shell(self.env_setup)
        if self.recipe.host == "trl":
            self._check_trl()
        else:
            self._check_verl()

    @property
    def processes_per_node(self) -> int:
        """Training processes on each node."""
        return self.gpus_per_node or 1

    def run_folders(self) -> list[Path]:
        """One folder for each run."""
        return [self.folder] if self.seeds is None else [self.folder / f"seed-{seed}" for seed in self.seeds]

    def deepspeed_file(self) -> Path | None:
        """The DeepSpeed configuration."""
        return None if self.deepspeed is None else DEEPSPEED.get(self.deepspeed, Path(self.deepspeed)).absolute()

    def _check_trl(self) -> None:
        if self.deepspeed is None:
            return
        if self.nodes * self.processes_per_node < 2:
            raise ConfigError("--deepspeed shards over several processes: give --gpus-per-node or --nodes as well")
        if "deepspeed" in self.recipe.profile(self.profile).arguments:
            raise ConfigError("--deepspeed and the recipe's argument deepspeed say the same thing: give one of them")
        file = self.deepspeed_file()
        try:
            json.loads(file.read_text())
        except FileNotFoundError:
            near = close_matches(self.deepspeed, DEEPSPEED)
            raise ConfigError(f"--deepspeed {self.deepspeed!r}: no such file{near} (or zero2, zero3)") from None
        except (OSError, ValueError) as error:
            raise ConfigError(f"--deepspeed {self.deepspeed!r}: {file} can't be read as JSON: {error}") from None

    def _check_verl(self) -> None:
        if self.deepspeed is not None:
            raise ConfigError("--deepspeed is for host trl; verl shards with FSDP")
        for key in (word.partition("=")[0].lstrip("+") for word in self.overrides):
            if key in VERL_KEYS:
                raise ConfigError(f"the job sets {key}: leave it to --nodes and --gpus-per-node")
        if self.profile == "tiny":
            return
        if self.nodes > 1 and self.gpus_per_node is None:
            raise ConfigError(f"verl on {self.nodes} nodes: --gpus-per-node is missing")
        needed = VERL_CPUS_PER_GPU * (self.gpus_per_node or 1) + 1
        if self.cpus_per_task is None or self.cpus_per_task < needed:
            raise ConfigError(
                f"--cpus-per-task {self.cpus_per_task or 'is missing'}: verl reserves {VERL_CPUS_PER_GPU} CPUs for each"
                f" of the {self.gpus_per_node or 1} GPUs of a node and waits for ever without; give at least {needed}"
            )


def recorded_job(folder: Path) -> str | None:
    """The id of the job whose run a folder holds or will hold."""
    try:
        return (folder / JOB_FOLDER / "job").read_text().strip() or None
    except OSError:
        return None


def make_job(
    path: Path,
    overrides: Sequence[str],
    *,
    host: str | None = None,
    profile: str = "tiny",
    seed: int = 0,
    array: str | None = None,
    output: Path | None = None,
    resume: bool = False,
    overwrite: bool = False,
    python: str | None = None,
    env_setup: tuple[str, ...] = (),
    **options: Any,
) -> Job:
    """The job of a recipe file, as `rlx slurm` describes it; `options` are the remaining fields of `Job`.

    Run folder: runs/<name>-<seed> as with `rlx run`, of an array runs/<name>. Without set-up lines the job uses this
    interpreter, with them the `python` they bring.
    """
    if array is not None and seed != 0:
        raise ConfigError("--seed and --array exclude each other")
    if resume and overwrite:
        raise ConfigError("--resume and --overwrite exclude each other")
    source = load(path, host=host)
    seeds = None if array is None else Seeds.parse(array)
    default = Path("runs") / (source.name if seeds else f"{source.name}-{seed}")
    return Job(
        source=source,
        recipe=with_overrides(source, overrides, profile),
        recipe_file=path.absolute(),
        overrides=tuple(overrides),
        profile=profile,
        seed=seed,
        seeds=seeds,
        folder=(output or default).absolute(),
        existing="resumed" if resume else "replaced" if overwrite else "refused",
        env_setup=env_setup,
        python=python or ("python" if env_setup else sys.executable),
        workdir=Path.cwd(),
        **options,
    )


def _check_shell(lines: tuple[str, ...]) -> None:
    """Refuse set-up lines that would leave the script with an open quote or bracket."""
    try:
        done = subprocess.run(["bash", "-n"], input="\n".join(lines), capture_output=True, text=True)
    except FileNotFoundError:
        return
    if done.returncode != 0:
        raise ConfigError(f"--env-setup is not shell code: {done.stderr.strip()}")
