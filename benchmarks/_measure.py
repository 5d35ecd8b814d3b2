"""Timing of alternatives against one baseline: repetitions of both in turn, the median of the ratios, its spread.

CPU time of one thread is measured, which other processes on the machine lengthen least. Freed memory stays with the
process, as an accelerator's allocator keeps it: else the kernel's paging is part of every large tensor.
"""

from __future__ import annotations

import ctypes
import platform
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""Parameters of glibc's mallopt."""


Run = Callable[[], Any]

LEAST = 0.02
"""Seconds a timed stretch takes at least: short calls are repeated until they do."""
BAR = 2.0
"""Ratio to the baseline above which a candidate needs a reason."""


class Timed(NamedTuple):
    """Seconds per call (median), and the ratio to the baseline: its median, first and third quartile."""

    seconds: float
    ratio: float
    low: float
    high: float


def against(baseline: Run, candidates: Mapping[str, Run], repetitions: int = 7) -> dict[str, Timed]:
    """Every candidate in turn with the baseline, so that the load of the machine meets both.

    A candidate with state has a method `restore`, which is called before every timed stretch.
    """
    base_calls = _calls(baseline)
    return {name: _in_turn(baseline, base_calls, run, repetitions) for name, run in candidates.items()}


def _in_turn(baseline: Run, base_calls: int, run: Run, repetitions: int) -> Timed:
    """Each stretch of the candidate is compared with the mean of the baseline's before and after it."""
    calls = _calls(run)
    seconds, ratios = [], []
    before = _stretch(baseline, base_calls)
    for _ in range(repetitions):
        seconds.append(_stretch(run, calls))
        after = _stretch(baseline, base_calls)
        ratios.append(2 * seconds[-1] / (before + after))
        before = after
    low, _, high = statistics.quantiles(ratios, n=4)
    return Timed(statistics.median(seconds), statistics.median(ratios), low, high)


def _calls(run: Run) -> int:
    """How often to call in one stretch; the first call, which may fill caches, does not count."""
    run()
    return max(1, round(LEAST / max(_stretch(run, 1), 1e-7)))


def _stretch(run: Run, calls: int) -> float:
    """Seconds per call."""
    if hasattr(run, "restore"):
        run.restore()
    began = time.process_time()
    for _ in range(calls):
        run()
    return (time.process_time() - began) / calls


def table(
    title: str,
    baseline: str,
    timed: Mapping[str, Timed],
    others: Iterable[str] = (),
    reasons: Mapping[str, str] | None = None,
) -> str:
    """A Markdown table sorted by ratio: milliseconds, ratio with its quartiles, ratio to `others` of the candidates.

    `reasons`: by name, why a candidate takes about twice as long or more; one above `BAR` without a reason is marked.
    """
    others = list(others)
    head = ["", "ms", f"x {baseline}", "quartiles", *(f"x {name}" for name in others)]
    right = len(head) - 1
    if reasons is not None:
        head.append("why")
    lines = [
        f"### {title}",
        "",
        "| " + " | ".join(head) + " |",
        "|---|" + "---:|" * right + "---|" * (reasons is not None),
    ]
    for name, t in sorted(timed.items(), key=lambda item: item[1].ratio):
        cells = [name, f"{t.seconds * 1e3:.2f}", f"{t.ratio:.2f}", f"{t.low:.2f}-{t.high:.2f}"]
        cells += [f"{t.ratio / timed[other].ratio:.2f}" for other in others]
        if reasons is not None:
            cells.append(reasons.get(name, "**no reason stated**" if t.ratio > BAR else ""))
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def machine() -> str:
    """Make the process ready to measure; one line on where this runs."""
    torch.set_num_threads(1)
    _keep_memory()
    cpu = platform.processor() or platform.machine()
    try:
        with open("/proc/cpuinfo") as f:
            cpu = next(line.split(":", 1)[1].strip() for line in f if line.startswith("model name"))
    except (OSError, StopIteration):
        pass
    return f"torch {torch.__version__}, Python {platform.python_version()}, {cpu}, one thread"


def _keep_memory() -> None:
    """Hand no freed memory back to the system; nothing happens where the C library is not glibc."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, 32 * 2**20)  # the largest it accepts
        mallopt(M_TRIM_THRESHOLD, 2**31 - 1)
