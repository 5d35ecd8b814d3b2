"""A run that can be killed: trains, optionally kills itself with SIGKILL, and resumes from its last checkpoint.

usage: resumable.py MODEL FOLDER [STEP AT WHICH TO DIE]
"""

from __future__ import annotations

import json
import os
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback
from transformers.trainer_utils import get_last_checkpoint
from trl_tiny import dataset, logs, trainer, weights

import rlx_plugins as rlx


@rlx.register("allocator", "test_growing")
@dataclass
class Growing(rlx.Allocator):
    """More rollouts the lower the rewards it has been told of."""

    mean: float = rlx.state(0.0)
    seen: dict = rlx.state(factory=dict)

    def more(self, idle: list[rlx.Group], ctx: rlx.Context) -> list[rlx.Rollout]:
        n = 3 if self.mean > 0.3 else 5
        return [r for g in idle if not g.rollouts for r in g.start(n + self.seen.get(g.prompt_key, 0))]

    def observe(self, groups: list[rlx.Group], ctx: rlx.Context) -> None:
        for g in groups:
            self.seen[g.prompt_key] = self.seen.get(g.prompt_key, 0) + 1

    def feedback(self, batch: rlx.RolloutBatch, ctx: rlx.Context) -> None:
        self.mean = 0.5 * self.mean + 0.5 * float(batch.rewards.nanmean())


@rlx.register("advantage", "test_running_mean")
@dataclass
class RunningMean(rlx.Advantage):
    """Reward minus the mean of all rewards so far."""

    mean: torch.Tensor = rlx.state(factory=lambda: torch.zeros(()))

    def __call__(self, batch: rlx.RolloutBatch) -> dict[str, Any]:
        self.mean = 0.8 * self.mean + 0.2 * batch.rewards.nanmean().cpu()
        return {"advantages": batch.spread(batch.rewards - self.mean.to(batch.device))}


class Die(TrainerCallback):
    """The end of the process without a word, right after a step's log."""

    def __init__(self, step: int):
        self.step = step

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            os.kill(os.getpid(), signal.SIGKILL)


def main(model: str, folder: Path, die_at: int | None) -> None:
    torch.set_num_threads(1)
    t = trainer(
        model,
        folder,
        plugins={"allocator": "test_growing", "advantage": "test_running_mean"},
        train_dataset=dataset(6),  # 2 prompts a batch, 2 steps a batch: 3 batches, 6 steps an epoch
        num_iterations=2,
        max_steps=16,
        save_strategy="steps",
        save_steps=4,
        callbacks=[] if die_at is None else [Die(die_at)],
    )
    t.train(resume_from_checkpoint=get_last_checkpoint(str(folder)))
    torch.save(weights(t), folder / "weights.pt")
    (folder / "logs.json").write_text(json.dumps(logs(t)))
    (folder / "state.json").write_text(json.dumps(t.parts.state_dict(), default=float))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]) if len(sys.argv) > 3 else None)
