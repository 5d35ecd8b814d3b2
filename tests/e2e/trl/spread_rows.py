"""Trains the same rows spread over micro-batches and, under torchrun, over ranks; saves losses and weights.

usage: [torchrun --nproc_per_node 2] spread_rows.py MODEL OUT [ZERO STAGE]
"""

from __future__ import annotations

import hashlib
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from trl_tiny import TRL_EQUIVALENT, dataset, logs, trainer, weights

import rlx_plugins as rlx

ROWS, GROUP = 24, 8  # with two ranks the second group lies on both


@rlx.register("reward", "test_by_answer")
@dataclass
class ByAnswer(rlx.Reward):
    """A tenth of the number the rollout code returned as text."""

    requires = frozenset({"answer"})

    def __call__(self, batch: rlx.RolloutBatch) -> dict[str, Any]:
        return {"rewards": batch.rewards + batch.rewards.new_tensor([float(text) / 10 for text in batch.answer])}


@rlx.register("hint", "test_prefix")
@dataclass
class Prefix(rlx.Hint):
    """Another first token for every rollout of a group, so that greedy continuations differ."""

    def prepare(self, new: list[rlx.Rollout], groups: dict[str, rlx.Group], ctx: rlx.Context) -> None:
        for r in new:
            r.segments = [rlx.Segment([40 + r.slot], "hint")]

    def annotate(self, groups: list[rlx.Group], ctx: rlx.Context) -> Any:
        """Rank 0 asks, all ranks compute: scores of every row, in order."""
        rows = [r for g in groups for r in g.done()]
        logps = yield rlx.Forward(rows, "logp")
        entropies = yield rlx.Forward(rows, "prompt_entropy")
        hidden = yield rlx.Forward(rows, "hidden")
        weights = [1 + i for i in range(len(rows))]
        ctx.log("hint/logp", sum(w * sum(logp) for w, logp in zip(weights, logps)))
        ctx.log("hint/prompt_entropy", sum(w * e for w, e in zip(weights, entropies)))
        ctx.log("hint/hidden", sum(w * float(h.sum()) for w, h in zip(weights, hidden)))


@rlx.register("allocator", "test_uneven")
@dataclass
class Uneven(rlx.Allocator):
    """4, 5, 6 ... rollouts for the prompts of a step."""

    told: int = rlx.state(0)

    def more(self, idle: list[rlx.Group], ctx: rlx.Context) -> list[rlx.Rollout]:
        sizes = {g.id: 4 + i for i, g in enumerate(ctx.started)}
        return [r for g in idle if not g.rollouts for r in g.start(sizes[g.id])]

    def feedback(self, batch: rlx.RolloutBatch, ctx: rlx.Context) -> None:
        self.told += batch.size


def fixed_rollouts(prompts: list[str], trainer: Any) -> dict[str, Any]:
    """Completions that depend on the global row only."""
    first = trainer.accelerator.process_index * len(prompts)
    ids, logps = [], []
    for i, prompt in enumerate(prompts):
        seed = hashlib.sha256(f"{prompt}/{first + i}/{trainer.state.global_step}".encode()).digest()
        ids.append([20 + byte % 60 for byte in seed[: 2 + seed[0] % 8]])
        logps.append([-4.5 - byte / 1000 for byte in seed[: len(ids[-1])]])
    prompt_ids = [trainer.processing_class(p)["input_ids"] for p in prompts]
    return {"prompt_ids": prompt_ids, "completion_ids": ids, "logprobs": logps}


def with_confidence(prompts: list[str], trainer: Any) -> dict[str, Any]:
    """The same completions with a field per token and one per row; integers on some ranks, fractions on others."""
    made = fixed_rollouts(prompts, trainer)
    fields = [[(t % 10) / 10 if len(ids) > 4 else 1 for t in ids] for ids in made["completion_ids"]]
    return made | {"confidence": fields, "answer": [str(len(ids)) for ids in made["completion_ids"]]}


RUNS: dict[str, dict[str, Any]] = {
    "update": {
        "plugins": TRL_EQUIVALENT,
        "rollout_func": fixed_rollouts,
        "beta": 0.1,
        "entropy_coef": 0.01,
        "num_iterations": 2,
    },
    "signals": {
        "plugins": {"reward": "test_by_answer", "advantage": "sao", "clip": "echo"},
        "rollout_func": with_confidence,
        "rollout_signals": ["confidence", "answer"],
        "value_model": "trl_tiny:token_values",
    },
    "program": {
        "plugins": {"allocator": "test_uneven", "hint": "test_prefix"},
        "generation_kwargs": {"do_sample": False},
        "num_iterations": 2,
    },
}


def zero(stage: int) -> dict[str, Any]:
    """A DeepSpeed configuration that runs in float32 on the CPU."""
    auto = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "train_batch_size", "gradient_clipping")
    return {
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "bf16": {"enabled": False},
        "fp16": {"enabled": False},
        **dict.fromkeys(auto, "auto"),
    }


def main(model: str, out: Path, stage: int | None) -> None:
    torch.set_num_threads(1)
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    for name, settings in RUNS.items():
        for micro_batches in (1, 3) if stage is None else (3,):
            t = trainer(
                model,
                out / "trainer",
                per_device_train_batch_size=ROWS // ranks // micro_batches,
                gradient_accumulation_steps=micro_batches,
                num_generations=GROUP,
                train_dataset=dataset(),
                optim="sgd",
                learning_rate=0.5,
                **({} if stage is None else {"deepspeed": zero(stage)}),
                **settings,
            )
            t.train()
            if t.accelerator.is_main_process:
                result = {"losses": [row["loss"] for row in logs(t)], "weights": weights(t), "logs": logs(t)}
                torch.save(result, out / f"{name}-{ranks}-{micro_batches}{'-zero' if stage else ''}.pt")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]) if len(sys.argv) > 3 else None)
