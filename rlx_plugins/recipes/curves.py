"""Curves of one or several runs as a PNG: reward, completion length, and the plug-ins' own numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

Records = Sequence[Mapping[str, Any]]


def smoothed(values: Sequence[float], decay: float = 0.9) -> list[float]:
    """Exponential moving average, corrected for its start; `decay` is the weight of the old value."""
    out, total, weight = [], 0.0, 0.0
    for value in values:
        total, weight = decay * total + (1 - decay) * value, decay * weight + (1 - decay)
        out.append(total / weight)
    return out


def plot(runs: Mapping[str, Records], path: Path, *, title: str = "") -> None:
    """Draw reward against steps and against generated tokens, and completion length against steps."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    panels = [
        ("step", "reward", "update step", "mean reward"),
        ("generated_tokens", "reward", "generated tokens", "mean reward"),
        ("step", "completion_length", "update step", "mean completion length (tokens)"),
    ]
    figure, axes = plt.subplots(1, len(panels), figsize=(4.6 * len(panels), 3.6), layout="constrained")
    for axis, (x_name, y_name, x_label, y_label) in zip(axes, panels):
        for i, (name, records) in enumerate(runs.items()):
            points = [
                (r[x_name], r[y_name]) for r in records if r.get(x_name) is not None and r.get(y_name) is not None
            ]
            if points:
                x, y = zip(*points)
                axis.plot(x, y, color=f"C{i}", alpha=0.2, linewidth=0.8)
                axis.plot(x, smoothed(y), color=f"C{i}", linewidth=1.8, label=name)
        axis.set_xlabel(x_label)
        axis.set_ylabel(y_label)
        axis.grid(alpha=0.25)
    if any(runs.values()):
        axes[0].legend(frameon=False)
    figure.suptitle(title)
    figure.savefig(path, dpi=120)
    plt.close(figure)
