"""Fails on one rank: a hook of the program raises on rank 0, or log-probs turn NaN on rank 1.

usage: torchrun --nproc_per_node 2 failing.py MODEL OUT hook|nan
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from trl_tiny import trainer

import rlx_plugins as rlx


@rlx.register("allocator", "test_failing")
@dataclass
class Failing(rlx.Allocator):
    """Starts one round, then fails."""

    def more(self, idle: list[rlx.Group], ctx: rlx.Context) -> list[rlx.Rollout]:
        if any(g.rollouts for g in idle):
            raise ZeroDivisionError("no groups left")
        return [r for g in idle for r in g.start(4)]


def diverge(module: Any, args: Any, out: Any) -> None:
    if torch.is_grad_enabled():
        out.last_hidden_state = out.last_hidden_state * math.nan


def main(model: str, out: Path, how: str) -> None:
    torch.set_num_threads(1)
    plugins = {"allocator": "test_failing"} if how == "hook" else {"advantage": "grpo"}
    t = trainer(model, out, plugins=plugins)
    if how == "nan" and t.accelerator.process_index == 1:
        t.model.model.register_forward_hook(diverge)
    try:
        t.train()
    except Exception as error:
        (out / f"{t.accelerator.process_index}.txt").write_text(f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3])
