"""The figures of a comparison: curves over steps, tokens and time, and the paired differences with their intervals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..recipes.curves import smoothed
from .results import Results
from .runs import Run

AXES = {
    "step": "optimizer step",
    "generated_tokens": "generated tokens",
    "update_tokens": "update tokens",
    "seconds": "seconds",
}
"""What curves are drawn against: name in the metrics -> label."""

POINTS = 200
"""Points of a mean curve."""


def draw_curves(runs: Mapping[str, Sequence[Run]], path: Path, *, metric: str = "reward") -> None:
    """Draw `metric` of every arm against steps, tokens and time: a thin line per run, the mean over runs in bold."""
    plt = _pyplot()
    records = [record for of_arm in runs.values() for run in of_arm for record in run.records]
    axes_of = {x: label for x, label in AXES.items() if x == "step" or any(r.get(x) is not None for r in records)}
    rows, columns = -(-len(axes_of) // 2), min(2, len(axes_of))
    figure, axes = plt.subplots(
        rows, columns, figsize=(5 * columns, 3.4 * rows + 0.3), layout="constrained", sharey=True, squeeze=False
    )
    for axis, (x_name, label) in zip(axes.flat, axes_of.items()):
        for i, (arm, of_arm) in enumerate(runs.items()):
            lines = [line for run in of_arm if (line := curve(run.records, x_name, metric)) is not None]
            for x, y in lines:
                axis.plot(x, y, color=f"C{i}", alpha=0.25, linewidth=0.7)
            if lines:
                axis.plot(*mean_curve(lines), color=f"C{i}", linewidth=2, label=arm)
        axis.set_xlabel(label)
        axis.grid(alpha=0.25)
    for row in axes:
        row[0].set_ylabel(f"{metric} (moving average)")
    for axis in axes.flat[len(axes_of) :]:
        axis.set_axis_off()
    handles, labels = axes[0][0].get_legend_handles_labels()
    if handles:
        figure.legend(handles, labels, loc="outside lower center", ncols=min(4, len(labels)), frameon=False)
    figure.savefig(path, dpi=100)
    plt.close(figure)


def curve(records: Sequence[Mapping[str, Any]], x_name: str, y_name: str) -> tuple[np.ndarray, np.ndarray] | None:
    """One run's points and their moving average; None without a point."""
    points = [(r[x_name], r[y_name]) for r in records if r.get(x_name) is not None and r.get(y_name) is not None]
    if not points:
        return None
    x, y = zip(*points, strict=True)
    return np.array(x, dtype=float), np.array(smoothed(y))


def mean_curve(lines: Sequence[tuple[np.ndarray, np.ndarray]]) -> tuple[np.ndarray, np.ndarray]:
    """The mean over runs on the range that all of them cover, interpolated linearly."""
    low, high = max(x[0] for x, _ in lines), min(x[-1] for x, _ in lines)
    grid = np.linspace(low, high, POINTS) if high > low else np.array([low])
    return grid, np.mean([np.interp(grid, x, y) for x, y in lines], axis=0)


def draw_differences(results: Results, path: Path) -> None:
    """Draw each arm's paired differences: a dot per seed, the mean with its interval."""
    plt = _pyplot()
    figure, axis = plt.subplots(figsize=(7, 1.1 + 0.5 * len(results.outcomes)), layout="constrained")
    control = results.scores[results.metric][results.baseline]
    for y, outcome in enumerate(reversed(results.outcomes)):
        color = f"C{results.arms.index(outcome.arm)}"
        own = results.scores[results.metric][outcome.arm]
        d = [own[s] - control[s] for s in results.seeds]  # type: ignore[operator]
        axis.plot(d, [y] * len(d), "o", color=color, alpha=0.35, markersize=5)
        pair = outcome.paired
        if pair.lo is not None and pair.hi is not None:
            axis.plot([pair.lo, pair.hi], [y, y], color=color, linewidth=2)
        if pair.mean is not None:
            axis.plot(pair.mean, y, "D", color=color, markersize=7)
    axis.axvline(0, color="0.4", linewidth=1)
    axis.set_yticks(range(len(results.outcomes)), [o.arm for o in reversed(results.outcomes)])
    axis.set_ylim(-0.6, len(results.outcomes) - 0.4)
    axis.set_xlabel(
        f"{results.metric}: difference to {results.baseline} of the same seed, {results.level:.0%} interval"
    )
    axis.grid(axis="x", alpha=0.25)
    figure.savefig(path, dpi=100)
    plt.close(figure)


def _pyplot() -> Any:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot
