"""The command `rlx`: list and show plug-ins, check and run recipes, look at the installation."""

from __future__ import annotations

import dataclasses
import inspect
import sys
from pathlib import Path
from typing import Annotated, Any

try:
    import typer
    from rich.console import Console
    from rich.table import Table
except ImportError as missing:
    raise SystemExit(f"rlx needs the package {missing.name!r}: pip install 'rlx-plugins[cli]'") from None

from . import __version__
from .core.errors import RLXError, close_matches
from .core.kinds import KINDS, Plugin
from .core.params import field_types, param_fields
from .core.registry import entry_point_failures, find, names

app = typer.Typer(
    no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help="Plug-ins for RL post-training."
)
out, err = Console(), Console(stderr=True)


@app.command("list")
def list_plugins(kind: Annotated[str | None, typer.Argument(help="one kind only")] = None) -> None:
    """List the plug-ins: kind, name, what it does, what it needs."""
    if kind is not None and kind not in KINDS:
        fail(f"unknown kind {kind!r}{close_matches(kind, KINDS)} (kinds: {', '.join(KINDS)})")
    table = Table("kind", "name", "what it does", "needs", box=None, pad_edge=False)
    for k in [kind] if kind else KINDS:
        for name in names(k):
            cls = find(k, name)
            table.add_row(k, name, first_sentence(cls), ", ".join(needs(cls)))
    out.print(table)
    for source, error in entry_point_failures().items():
        err.print(f"entry point {source} could not be loaded: {error}", markup=False)


@app.command()
def show(kind: str, name: str) -> None:
    """Show one plug-in: what it does, parameters with their defaults, paper, requirements, hosts."""
    cls = find(kind, name)
    out.print(f"[bold]{kind} {name}[/bold]  ({cls.__module__}.{cls.__qualname__})", highlight=False)
    out.print(inspect.getdoc(cls) or "", markup=False, highlight=False)
    out.print()
    table = Table("parameter", "type", "default", "meaning", box=None, pad_edge=False)
    hints = field_types(cls)
    for field_name, f in param_fields(cls).items():
        table.add_row(field_name, type_text(hints[field_name]), default_text(f), str(f.metadata.get("doc", "")))
    if param_fields(cls):
        out.print(table)
    facts = {
        "paper": cls.paper,
        "signals": ", ".join(needs(cls)),
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
    """Check recipes: keys, plug-in names, parameters. Imports no host; exits with 1 if any is wrong."""
    from .recipes.schema import load

    files = [f for p in paths for f in (sorted(p.rglob("*.yaml")) if p.is_dir() else [p])]
    if not files:
        fail(f"no recipe in {', '.join(map(str, paths))}")
    wrong = 0
    for file in files:
        try:
            recipe = load(file)
        except RLXError as error:
            wrong += 1
            err.print(f"[red]wrong[/red]  {error}", highlight=False)
        else:
            out.print(f"[green]ok[/green]     {file}  {recipe.title}", highlight=False)
    if wrong:
        raise typer.Exit(1)


@app.command()
def run(
    recipe: Path,
    overrides: Annotated[list[str] | None, typer.Argument(help="key=value: a kind, or the host's argument")] = None,
    profile: Annotated[str, typer.Option(help="tiny or paper")] = "tiny",
    seed: Annotated[int, typer.Option(help="of weights, data order and sampling")] = 0,
    output: Annotated[Path | None, typer.Option(help="run folder [runs/<name>-<seed>]")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="go on from the folder's last checkpoint")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="replace the run in the folder")] = False,
    print_only: Annotated[bool, typer.Option("--print", help="print the host's command instead (host verl)")] = False,
) -> None:
    """Train a recipe, then print first and last reward, tokens and time, and draw the curves."""
    from .recipes.run_folder import RunFolder
    from .recipes.runner import command_text
    from .recipes.runner import run as run_recipe
    from .recipes.schema import load, with_overrides

    chosen = with_overrides(load(recipe), overrides or [], profile)
    path = output or Path("runs") / f"{chosen.name}-{seed}"
    if print_only:
        print(command_text(chosen, RunFolder(path), profile=profile, seed=seed, resume=resume))
        return
    folder = RunFolder.open(path, resume=resume, overwrite=overwrite)
    with progress_bar(chosen.name) as progress:
        summary = run_recipe(chosen, folder, profile=profile, seed=seed, resume=resume, progress=progress)
    out.print(summary_table({chosen.name: summary}))
    out.print(f"curves   {folder.curves}\nmetrics  {folder.metrics}", highlight=False)


@app.command()
def doctor() -> None:
    """Show which hosts are installed in which versions, and whether the seams the plug-ins use hold there."""
    from .hosts.inspection import HOSTS, inspect_host

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


def summary_table(summaries: dict[str, dict[str, Any]]) -> Table:
    """Runs side by side: reward and held-out accuracy before and after, tokens, time."""
    table = Table("run", "steps", "reward first", "last", "accuracy before", "after", "tokens", "seconds", box=None)
    for name, s in summaries.items():
        table.add_row(
            name,
            str(s["steps"]),
            *(number(s.get(k), 3) for k in ("reward_first", "reward_last", "accuracy_before", "accuracy_after")),
            f"{s['tokens']:,}",
            number(s["seconds"], 0),
        )
    return table


def number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


class progress_bar:
    """A context manager whose value is a progress callback: steps done, reward, time left."""

    def __init__(self, label: str):
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        self.bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("reward {task.fields[reward]}"),
            TimeRemainingColumn(),
            console=err,
        )
        self.label = label

    def __enter__(self) -> Any:
        self.bar.__enter__()
        task = self.bar.add_task(self.label, total=None, reward="-")

        def update(record: Any) -> None:
            reward = number(record.get("reward"), 3)
            self.bar.update(task, total=record.get("max_steps"), completed=record["step"], reward=reward)

        return update

    def __exit__(self, *failure: Any) -> None:
        self.bar.__exit__(*failure)


def first_sentence(cls: type) -> str:
    """The first sentence of a class's docstring."""
    text = " ".join((inspect.getdoc(cls) or "").split("\n\n")[0].split())
    return text.split(". ")[0].rstrip(".")


def default_instance_value(cls: type[Plugin], name: str) -> frozenset[str]:
    """`requires`, `provides` or `capabilities` of the plug-in with its default parameters."""
    value = getattr(cls, name, frozenset())
    if isinstance(value, property):
        required = [f for f in param_fields(cls).values() if f.default is f.default_factory is dataclasses.MISSING]
        return frozenset() if required else frozenset(getattr(cls(), name))
    return frozenset(value)


def needs(cls: type[Plugin]) -> list[str]:
    """Signals and capabilities a plug-in needs with its default parameters."""
    return sorted(default_instance_value(cls, "requires")) + sorted(default_instance_value(cls, "capabilities"))


def hosts_of(cls: type[Plugin]) -> list[str]:
    """Hosts that can carry the plug-in in some configuration."""
    from .hosts.inspection import HOSTS

    wanted = default_instance_value(cls, "capabilities")
    missing = {name: sorted(wanted - host.capabilities()) for name, host in HOSTS.items()}
    return [name if not gaps else f"not {name} (lacks {', '.join(gaps)})" for name, gaps in missing.items()]


def type_text(t: Any) -> str:
    return inspect.formatannotation(t).replace("typing.", "")


def default_text(f: dataclasses.Field[Any]) -> str:
    if f.default is not dataclasses.MISSING:
        return str(f.default)
    return "required" if f.default_factory is dataclasses.MISSING else str(f.default_factory())


def fail(message: str) -> None:
    err.print(message, style="red", markup=False, highlight=False)
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
