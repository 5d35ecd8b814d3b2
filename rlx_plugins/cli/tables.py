"""What the commands print: tables of runs, a progress bar."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

if TYPE_CHECKING:
    from ..slurm.status import RunStatus


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


def comparison_table(results: Any) -> Table:
    """Each arm against the baseline: mean, paired difference, interval, corrected p, verdict."""
    from ..comparison.report import VERDICTS, interval, num, pvalue, signed

    columns = [results.metric, "difference", f"{results.level:.0%} interval", "p (Holm)", "verdict"]
    table = Table("arm", *columns, box=None, pad_edge=False)
    table.add_row(results.baseline, num(results.means[results.metric][results.baseline]), "", "", "", "baseline")
    for o in results.outcomes:
        figures = (num(o.mean), signed(o.paired.mean), escape(interval(o.paired)), pvalue(o.holm))
        table.add_row(o.arm, *figures, VERDICTS[o.verdict].strip("*"))
    return table


def status_table(runs: Sequence[RunStatus]) -> Table:
    """One run a row: state, job, steps, last reward, time."""
    table = Table("run", "state", "job", "step", "reward", "seconds", "idle", "note", box=None, pad_edge=False)
    colours = {"finished": "green", "running": "green", "pending": "yellow", "not started": "yellow"}
    for run in runs:
        step = "-" if run.step is None else f"{run.step}/{run.of or '?'}"
        numbers = (number(run.reward, 3), number(run.seconds, 0), number(run.idle, 0))
        state = f"[{colours.get(run.state, 'red')}]{run.state}[/]"
        table.add_row(escape(run.folder), state, run.job or "-", step, *numbers, escape(run.note))
    return table


def number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


class progress_bar:
    """A context manager whose value is a progress callback: steps done, reward, time left."""

    def __init__(self, label: str, console: Console):
        self.bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("reward {task.fields[reward]}"),
            TimeRemainingColumn(),
            console=console,
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
