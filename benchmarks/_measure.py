"""Timing of alternatives in one run: interleaved rounds, medians, ratios against a baseline of the same run."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any


def medians(candidates: Mapping[str, Callable[[], Any]], seconds: float = 0.4, rounds: int = 7) -> dict[str, float]:
    """Median seconds per call of each candidate; rounds are interleaved so that drift hits all alike."""
    calls = {}
    for name, run in candidates.items():
        run()
        began = time.perf_counter()
        run()
        once = time.perf_counter() - began
        calls[name] = max(1, int(seconds / rounds / max(once, 1e-7)))
    samples: dict[str, list[float]] = {name: [] for name in candidates}
    for _ in range(rounds):
        for name, run in candidates.items():
            began = time.perf_counter()
            for _ in range(calls[name]):
                run()
            samples[name].append((time.perf_counter() - began) / calls[name])
    return {name: statistics.median(s) for name, s in samples.items()}


def table(title: str, times: Mapping[str, float], baselines: list[str]) -> str:
    """A Markdown table: milliseconds, and the ratio to each baseline."""
    head = ["", "ms", *(f"x {b}" for b in baselines)]
    lines = [f"### {title}", "", "| " + " | ".join(head) + " |", "|---|" + "---:|" * (len(head) - 1)]
    for name, t in times.items():
        lines.append(f"| {name} | {t * 1e3:.3f} | " + " | ".join(f"{t / times[b]:.2f}" for b in baselines) + " |")
    return "\n".join(lines) + "\n"


def machine() -> str:
    """One line on where this ran."""
    import platform

    import torch

    cpu = platform.processor() or platform.machine()
    try:
        with open("/proc/cpuinfo") as f:
            cpu = next(line.split(":", 1)[1].strip() for line in f if line.startswith("model name"))
    except (OSError, StopIteration):
        pass
    threads = torch.get_num_threads()
    return f"torch {torch.__version__}, Python {platform.python_version()}, {cpu}, {threads} thread(s)"
