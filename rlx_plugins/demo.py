"""The main job in a few minutes on two CPU cores: GRPO, and the same run with plug-ins, side by side.

Both arms start from the same weights and see the same prompts. Run by `make demo`.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table

from .cli.tables import number, summary_table
from .recipes.curves import plot
from .recipes.run_folder import RunFolder, read_json

RECIPE = Path(__file__).parent.parent / "recipes" / "quickstart.yaml"
ARMS = {"GRPO": ["plugins=none"], "DVAO + BAPO + ALP": []}
SEED = 0


def main(output: Path = Path("runs/demo")) -> None:
    """Warm up the tiny model, train both arms in parallel, print the table, draw the picture."""
    from .testing.tiny_model import tiny_model_path

    console = Console()
    began = time.monotonic()
    with console.status("warming up a tiny model on reasoning_gym problems (once, then cached)"):
        tiny_model_path()
    console.print(f"tiny model ready after {time.monotonic() - began:.0f} s")
    folders = {name: RunFolder(output / f"arm-{i}") for i, name in enumerate(ARMS)}
    processes = {name: start(folders[name], overrides) for name, overrides in ARMS.items()}
    try:
        with Live(console=console, refresh_per_second=2) as live:
            while any(p.poll() is None for p in processes.values()):
                live.update(progress_table(folders))
                time.sleep(1)
            live.update(progress_table(folders))
    finally:
        for p in processes.values():
            p.terminate()
    failed = [name for name, p in processes.items() if p.returncode != 0]
    if failed:
        for name in failed:
            console.print((folders[name].path / "log.txt").read_text()[-4000:], markup=False, highlight=False)
        raise SystemExit(f"failed: {', '.join(failed)}")
    console.print(summary_table({name: read_json(folder.summary) for name, folder in folders.items()}))
    picture = output / "curves.png"
    plot(
        {name: folder.records() for name, folder in folders.items()},
        picture,
        title="GRPO and the same run with plug-ins",
    )
    console.print(f"picture  {picture}\ntotal    {time.monotonic() - began:.0f} s", highlight=False)


def start(folder: RunFolder, overrides: list[str]) -> subprocess.Popen[bytes]:
    """One arm as a process of its own, on one thread, its output in the arm's log."""
    folder.path.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "rlx_plugins.cli", "run", str(RECIPE), *overrides]
    command += ["--seed", str(SEED), "--output", str(folder.path), "--overwrite"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    folder.metrics.unlink(missing_ok=True)
    with (folder.path / "log.txt").open("wb") as log:
        return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)


def progress_table(folders: dict[str, RunFolder]) -> Table:
    """Steps done and latest reward of each arm."""
    table = Table("run", "step", "reward", box=None)
    for name, folder in folders.items():
        records: list[dict[str, Any]] = folder.records()
        if not records:
            table.add_row(name, "starting", "-")
            continue
        recent = [r["reward"] for r in records[-10:] if r["reward"] is not None]
        mean = sum(recent) / len(recent) if recent else None
        table.add_row(name, f"{records[-1]['step']}/{records[-1]['max_steps']}", number(mean, 3))
    return table


if __name__ == "__main__":
    main()
