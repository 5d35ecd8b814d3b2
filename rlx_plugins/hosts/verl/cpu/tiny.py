"""The tiny task (``rlx_plugins.testing.tiny_tasks``) in verl's formats: parquet files and a reward function."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

__all__ = ["compute_score", "tiny_files"]

DATA_SOURCE = "rlx_tiny"


def tiny_files(
    task: str = "chain_sum",
    train_size: int = 2000,
    eval_size: int = 400,
    seed: int = 0,
    cache_dir: Path | str | None = None,
) -> tuple[Path, Path]:
    """The training and the held-out parquet file with verl's columns, written once for the same arguments.

    Columns: those of ``tiny_dataset`` but ``entry``, ``data_source``, ``reward_model.ground_truth`` (the answer) and
    ``extra_info`` (``index``, ``split``, ``entry``: reasoning_gym's record as JSON).
    """
    from importlib.metadata import version

    from ....testing import tiny_tasks
    from ....testing.tiny_model import cached_folder, source_digest

    sizes = {"train": train_size, "eval": eval_size}

    def build(folder: Path) -> None:
        for split, size in sizes.items():
            problems = tiny_tasks.tiny_dataset(split, size, seed, task)
            problems.map(
                lambda row, index, split=split: _row(row, index, split),
                with_indices=True,
                remove_columns=["entry"],
                load_from_cache_file=False,
            ).to_parquet(str(folder / f"{split}.parquet"))

    key = {"task": task, "sizes": sizes, "seed": seed, "code": source_digest(tiny_tasks, sys.modules[__name__])}
    key |= {package: version(package) for package in ("datasets", "reasoning-gym")}
    folder = cached_folder(f"tiny-verl-{task}", key, build, cache_dir)
    return folder / "train.parquet", folder / "eval.parquet"


def _row(row: dict[str, Any], index: int, split: str) -> dict[str, Any]:
    return {
        "data_source": DATA_SOURCE,
        "reward_model": {"style": "rule", "ground_truth": row["answer"]},
        "extra_info": {"index": index, "split": split, "entry": row["entry"]},
    }


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: str,
    extra_info: dict[str, Any],
    accuracy: float = 1.0,
    format: float = 0.0,
    brevity: float = 0.0,
    facts: Sequence[str] = (),
    **others: Any,
) -> dict[str, Any]:
    """The tiny task's rewards for one response: ``score``, a weighted sum, and its parts; and the ``facts`` named.

    The weights are ``reward.custom_reward_function.reward_kwargs``; by default accuracy alone counts.
    """
    from ....testing import tiny_tasks
    from ....testing.tiny_tasks import accuracy_reward, brevity_reward, format_reward

    texts, entries = [solution_str], [extra_info["entry"]]
    parts = {
        "accuracy": accuracy_reward(texts, entries)[0],
        "format": format_reward(texts, entries)[0],
        "brevity": brevity_reward(texts)[0],
    }
    weights = {"accuracy": accuracy, "format": format, "brevity": brevity}
    told = tiny_tasks.facts(solution_str, json.loads(extra_info["entry"])) if facts else {}
    score = sum(weights[name] * value for name, value in parts.items())
    return {"score": score, **parts, **{name: told[name] for name in facts}}
