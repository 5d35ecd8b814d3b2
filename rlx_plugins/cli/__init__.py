"""The command `rlx`: list and show plug-ins, check and run recipes, look at the installation."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import Annotated, NoReturn

try:
    import typer
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table
except ImportError as missing:
    raise SystemExit(f"rlx needs the package {missing.name!r}: pip install 'rlx-plugins[cli]'") from None

from .. import __version__
from ..core.errors import RLXError, close_matches
from ..core.kinds import KINDS
from ..core.params import field_types, param_fields
from ..core.registry import entry_point_failures, find, names
from .descriptions import default_instance_value, default_text, first_sentence, hosts_of, needs, type_text, unwrapped
from .tables import comparison_table, progress_bar, status_table, summary_table

app = typer.Typer(
    no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help="Plug-ins for RL post-training."
)
ProfileOption = Annotated[str, typer.Option(help="tiny or paper")]
HostOption = Annotated[str | None, typer.Option(help="one of the recipe's hosts, by default its first")]
SeedOption = Annotated[int, typer.Option(help="of weights, data order and sampling")]
ResumeOption = Annotated[bool, typer.Option("--resume", help="go on from the folder's last checkpoint")]
OverwriteOption = Annotated[bool, typer.Option("--overwrite", help="replace the run in the folder")]

out, err = Console(), Console(stderr=True)
PIPED_WIDTH = 600
"""Columns of a table that goes into a file or a pipe: no line is cut."""


@app.command("list")
def list_plugins(kind: Annotated[str | None, typer.Argument(help="one kind only")] = None) -> None:
    """List the plug-ins: kind, name, hosts that can run it, what it needs, what it does (whole where piped)."""
    if kind is not None and kind not in KINDS:
        fail(f"unknown kind {kind!r}{close_matches(kind, KINDS)} (kinds: {', '.join(KINDS)})")
    table = Table(box=None, pad_edge=False)
    for column in ("kind", "name"):
        table.add_column(column, no_wrap=True)
    for column in ("hosts", "needs"):
        table.add_column(column, max_width=30 if out.is_terminal else None)
    table.add_column("what it does", no_wrap=True, overflow="ellipsis")
    for k in [kind] if kind else KINDS:
        for name in names(k):
            cls = find(k, name)
            cells = (", ".join(hosts_of(cls)), ", ".join(needs(cls)), first_sentence(cls))
            table.add_row(k, name, *map(escape, cells))
    (out if out.is_terminal else Console(width=PIPED_WIDTH)).print(table)
    for source, error in entry_point_failures().items():
        err.print(f"entry point {source} could not be loaded: {error}", markup=False)


@app.command()
def show(
    kind: Annotated[str, typer.Argument(help="the kind of the plug-in")],
    name: Annotated[str | None, typer.Argument(help="its name")] = None,
) -> None:
    """Show one plug-in: what it does, parameters with their defaults, paper, requirements, hosts."""
    if name is None:
        fail(f"rlx show takes a kind and a name; {completions_of(kind)}")
    cls = find(kind, name)
    out.print(f"[bold]{kind} {name}[/bold]  ({cls.__module__}.{cls.__qualname__})", highlight=False)
    out.print(unwrapped(cls), markup=False, highlight=False)
    out.print()
    table = Table("parameter", "type", "default", "meaning", box=None, pad_edge=False)
    hints = field_types(cls)
    for field_name, f in param_fields(cls).items():
        cells = (field_name, type_text(hints[field_name]), default_text(f), str(f.metadata.get("doc", "")))
        table.add_row(*map(escape, cells))
    if param_fields(cls):
        out.print(table)
    facts = {
        "paper": cls.paper,
        "signals": ", ".join(sorted(default_instance_value(cls, "requires"))),
        "makes": ", ".join(sorted(default_instance_value(cls, "provides"))),
        "capabilities": ", ".join(sorted(default_instance_value(cls, "capabilities"))),
        "hosts": ", ".join(hosts_of(cls)),
    }
    for label, text in facts.items():
        if text:
            out.print(f"{label:>12}  {text}", markup=False, highlight=False)
    example = f"{kind}={name}" + "".join(
        f" {kind}.{n}={default_text(f)}" for n, f in list(param_fields(cls).items())[:1] if default_text(f) != "None"
    )
    out.print(f"{'use':>12}  rlx run recipes/quickstart.yaml {example}", markup=False, highlight=False)


@app.command()
def check(paths: Annotated[list[Path], typer.Argument(help="recipe files or folders of them")]) -> None:
    """Check recipes and the bases they extend: keys, plug-ins, hosts. Imports no host; exits with 1 if any is wrong."""
    from ..recipes.checks import mistakes

    files = [f for p in paths for f in (sorted(p.rglob("*.yaml")) if p.is_dir() else [p])]
    if not files:
        fail(f"no recipe in {', '.join(map(str, paths))}")
    found = {file: mistakes(file) for file in files}
    for file, lines in found.items():
        if not lines:
            out.print(f"[green]ok[/green]     {file}", highlight=False, soft_wrap=True)
    for line in dict.fromkeys(line for lines in found.values() for line in lines):  # a base's mistake is told once
        err.print(f"[red]wrong[/red]  {escape(line)}", highlight=False, soft_wrap=True)
    if wrong := sum(map(bool, found.values())):
        err.print(f"{wrong} of {len(files)} files are wrong", highlight=False)
        raise typer.Exit(1)


@app.command()
def run(
    recipe: Path,
    overrides: Annotated[list[str] | None, typer.Argument(help="key=value: a kind, or the host's argument")] = None,
    profile: ProfileOption = "tiny",
    host: HostOption = None,
    seed: SeedOption = 0,
    output: Annotated[Path | None, typer.Option(help="run folder, by default runs/<name>-<seed>")] = None,
    resume: ResumeOption = False,
    overwrite: OverwriteOption = False,
    print_only: Annotated[bool, typer.Option("--print", help="print the host's command instead (host verl)")] = False,
) -> None:
    """Train a recipe, then print first and last reward, tokens and time, and draw the curves."""
    from ..recipes.run_folder import RunFolder, is_main_process
    from ..recipes.runner import command_text
    from ..recipes.runner import run as run_recipe
    from ..recipes.schema import load, with_overrides

    chosen = with_overrides(load(recipe, host=host), overrides or [], profile)
    path = output or Path("runs") / f"{chosen.name}-{seed}"
    if print_only:
        print(command_text(chosen, RunFolder(path), profile=profile, seed=seed, resume=resume))
        return
    if not is_main_process():  # of several that a launcher started
        run_recipe(chosen, RunFolder(path), profile=profile, seed=seed, resume=resume)
        return
    folder = RunFolder.open(path, resume=resume, overwrite=overwrite)
    with progress_bar(chosen.name, err) as progress:
        summary = run_recipe(chosen, folder, profile=profile, seed=seed, resume=resume, progress=progress)
    out.print(summary_table({chosen.name: summary}))
    out.print(f"curves   {folder.curves}\nmetrics  {folder.metrics}", highlight=False)


@app.command()
def compare(
    arms: Annotated[
        list[str], typer.Argument(help="name=recipe.yaml:key=value,... or name=folder of runs; name= is optional")
    ],
    seeds: Annotated[str | None, typer.Option(help="how many, or which: 5 or 3,7,11; default 5")] = None,
    profile: ProfileOption = "tiny",
    host: Annotated[str | None, typer.Option(help="one of the recipes' hosts, by default their first")] = None,
    output: Annotated[Path | None, typer.Option(help="folder, by default runs/compare-<arms>")] = None,
    baseline: Annotated[str | None, typer.Option(help="the arm others are compared with, by default the first")] = None,
    metric: Annotated[
        list[str] | None, typer.Option(help="accuracy, reward or a name of the metrics; the first one decides")
    ] = None,
    budget: Annotated[str, typer.Option(help="steps, generated=TOKENS or update=TOKENS")] = "steps",
    overrides: Annotated[list[str] | None, typer.Option("--set", help="key=value for every recipe")] = None,
    effect: Annotated[float | None, typer.Option(help="a difference worth finding: how many seeds?")] = None,
    level: Annotated[float, typer.Option(help="coverage of the intervals")] = 0.95,
    jobs: Annotated[int, typer.Option(min=1, help="runs at a time")] = 1,
    resume: Annotated[bool, typer.Option("--resume", help="go on with the comparison in the folder")] = False,
) -> None:
    """Run recipes on the same seeds, or collect runs, and report paired differences with their uncertainty."""
    from ..comparison.compare import Comparison, this_command

    plan = Comparison.plan(
        arms,
        output=output,
        seeds=seeds,
        profile=profile,
        baseline=baseline,
        metrics=metric or [],
        budget=budget,
        overrides=overrides or [],
        host=host,
        level=level,
        effect=effect,
    )
    plan.open(resume=resume)
    plan.execute(jobs=jobs, tell=lambda line: err.print(line, markup=False, highlight=False))
    results = plan.report(command=this_command())
    out.print(comparison_table(results))
    out.print(f"report   {plan.output / 'report.md'}\n         {plan.output / 'report.html'}", highlight=False)


@app.command()
def diagnose(
    folder: Annotated[Path, typer.Argument(help="folder of a run")],
    as_json: Annotated[bool, typer.Option("--json", help="as JSON")] = False,
) -> None:
    """Look for the usual pathologies in a run's metrics, with the evidence and the kinds that address each."""
    from ..diagnosis.report import print_diagnosis

    print_diagnosis(folder, out, as_json=as_json)


@app.command("slurm")
def slurm_job(
    recipe: Path,
    overrides: Annotated[list[str] | None, typer.Argument(help="key=value, as for rlx run")] = None,
    profile: ProfileOption = "tiny",
    host: HostOption = None,
    seed: SeedOption = 0,
    array: Annotated[str | None, typer.Option(help="a run for each seed: seeds=0-4, seeds=0-99%4")] = None,
    output: Annotated[
        Path | None, typer.Option(help="folder, by default runs/<name>-<seed>; array: runs/<name>")
    ] = None,
    nodes: Annotated[int, typer.Option(help="number of nodes")] = 1,
    gpus_per_node: Annotated[int | None, typer.Option(help="GPUs and training processes of a node")] = None,
    cpus_per_task: Annotated[int | None, typer.Option(help="CPU cores of a node")] = None,
    mem: Annotated[str | None, typer.Option(help="memory of a node: 64G")] = None,
    time: Annotated[str | None, typer.Option(help="time limit: minutes, hours:minutes:seconds, days-hours")] = None,
    partition: Annotated[str | None, typer.Option()] = None,
    account: Annotated[str | None, typer.Option()] = None,
    qos: Annotated[str | None, typer.Option()] = None,
    dependency: Annotated[str | None, typer.Option(help="such as afterok:1234")] = None,
    deepspeed: Annotated[str | None, typer.Option(help="zero2, zero3 or a file (host trl)")] = None,
    env_setup: Annotated[list[str] | None, typer.Option(help="shell code to run first, line by line")] = None,
    python: Annotated[str | None, typer.Option(help="by default this one; with --env-setup, python")] = None,
    requeue: Annotated[bool, typer.Option(help="run again after preemption or the time limit")] = True,
    resume: ResumeOption = False,
    overwrite: OverwriteOption = False,
    submit: Annotated[bool, typer.Option("--submit", help="hand the script to sbatch")] = False,
    print_only: Annotated[bool, typer.Option("--print", help="print the script and write nothing")] = False,
) -> None:
    """Write the sbatch script of a recipe into its run folder; submit or print it if told to."""
    from ..slurm import submit as submission
    from ..slurm.job import make_job
    from ..slurm.render import render

    if print_only and submit:
        fail("--print and --submit exclude each other")
    job = make_job(
        recipe,
        overrides or [],
        host=host,
        profile=profile,
        seed=seed,
        array=array,
        output=output,
        resume=resume,
        overwrite=overwrite,
        nodes=nodes,
        gpus_per_node=gpus_per_node,
        cpus_per_task=cpus_per_task,
        mem=mem,
        time=time,
        partition=partition,
        account=account,
        qos=qos,
        dependency=dependency,
        deepspeed=deepspeed,
        env_setup=tuple(env_setup or ()),
        python=python,
        requeue=requeue,
    )
    for text in submission.warnings(job):
        err.print(f"warning: {text}", style="yellow", markup=False, highlight=False)
    if print_only:
        print(render(job), end="")
    elif submit:
        print(f"job {submission.submit(job)}: {submission.log_pattern(job)}")
    else:
        print(f"sbatch {shlex.quote(str(submission.write(job)))}")


@app.command()
def status(
    folders: Annotated[list[Path] | None, typer.Argument(help="folders of runs, by default runs/")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="for machines")] = False,
) -> None:
    """Show the runs in a folder: their state, by Slurm if it runs them, and their last metrics."""
    from ..slurm.status import statuses

    runs = statuses(folders or [Path("runs")])
    if as_json:
        print(json.dumps([run.as_dict() for run in runs], indent=2))
        return
    out.print(status_table(runs))


@app.command()
def doctor() -> None:
    """Show which hosts are installed in which versions, and whether the seams the plug-ins use hold there."""
    from ..hosts.inspection import HOSTS, inspect_host

    broken = False
    out.print(f"rlx-plugins {__version__}, Python {sys.version.split()[0]}", highlight=False)
    table = Table("host", "version", "tested range", "seams", box=None, pad_edge=False)
    problems: list[str] = []
    for name in HOSTS:
        report = inspect_host(name)
        broken |= bool(report.problems)
        table.add_row(name, report.version or "not installed", report.tested, report.seams)
        problems += [f"{name}: {p}" for p in report.problems]
    out.print(table)
    for source, error in entry_point_failures().items():
        problems.append(f"entry point {source} could not be loaded: {error}")
    for problem in problems:
        err.print(problem, style="red", markup=False, highlight=False)
    if broken:
        raise typer.Exit(1)


@app.command()
def version() -> None:
    """Print the version."""
    out.print(__version__, highlight=False)


def completions_of(word: str) -> str:
    """What `rlx show <word>` may have meant: a kind without a name, or a name without its kind."""
    if word in KINDS:
        return f"names of kind {word}: {', '.join(names(word)) or 'none'}"
    kinds = [kind for kind in KINDS if word in names(kind)]
    if kinds:
        return "there is " + " and ".join(f"rlx show {kind} {word}" for kind in kinds)
    return f"{word!r} is neither{close_matches(word, [*KINDS, *(n for k in KINDS for n in names(k))])} (rlx list)"


def fail(message: str) -> NoReturn:
    err.print(f"error: {message}", style="red", markup=False, highlight=False)
    raise typer.Exit(2)


def main() -> None:
    """Entry point of the console script: our own errors become one message and exit code 2."""
    try:
        app()
    except RLXError as error:
        err.print(f"error: {error}", style="red", markup=False, highlight=False)
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()
