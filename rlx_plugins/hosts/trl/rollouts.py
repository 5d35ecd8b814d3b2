"""The rollout side of one step: run the program, pack its groups, and hand every rank its rows."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import gather_object
from torch import Tensor

from ...core.batch import RolloutBatch, pack
from ...core.config import Parts
from ...core.context import Context
from ...core.rollout import rollout_program
from ...core.trajectory import Group, Rollout
from .generation import LockStep
from .inputs import PROMPT_KEY

if TYPE_CHECKING:
    from .trainer import RLXTrainer


class Prompts(Mapping[str, list[int]]):
    """Token ids of the dataset's prompts by key, tokenised by TRL when asked for."""

    def __init__(self, trainer: RLXTrainer, rows: Mapping[str, int]):
        self.trainer, self.rows = trainer, rows
        self.known: dict[str, list[int]] = {}

    def __getitem__(self, key: str) -> list[int]:
        if key not in self.known:
            ids, _, _ = self.trainer._tokenize_prompts([self.trainer.dataset_row(key)["prompt"]])
            self.known[key] = list(ids[0])
        return self.known[key]

    def __contains__(self, key: object) -> bool:
        return key in self.rows

    def __iter__(self) -> Iterator[str]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)


@dataclass
class Rollouts:
    """What the program made, the same on every rank (`batch.rollout` only where a part requires it; rank 0
    always has it).

    batch       the packed rows, all ranks', without padding rows
    per_rank    rows each rank trains on, padding included; a multiple of steps_per_generation
    lengths     response tokens of each row, hints and tool output included
    teacher_contexts  what only a teacher sees after the prompt, per row
    components  [N,K] raw rewards in the order of TRL's reward functions
    logged      per row, what reward functions reported with log_extra; None: none of them has seen it
    metrics     what parts reported with ctx.log
    """

    batch: RolloutBatch
    per_rank: int
    lengths: list[int]
    teacher_contexts: list[list[int]]
    components: Tensor
    logged: list[dict[str, Any] | None]
    metrics: dict[str, float]

    def mine(self, rank: int) -> range:
        """Global row numbers of a rank; those beyond the batch are padding."""
        return range(rank * self.per_rank, (rank + 1) * self.per_rank)

    def components_of(self, rows: range) -> Tensor:
        """[n,K] raw rewards of the rows, NaN for padding."""
        out = self.components.new_full((len(rows), self.components.shape[1]), math.nan)
        real = [i for i in rows if i < self.batch.size]
        out[: len(real)] = self.components[real]
        return out


def run_program(trainer: RLXTrainer, parts: Parts, inputs: list[dict[str, Any]]) -> tuple[Rollouts, Context]:
    """Run one step of the rollout program on all ranks."""
    args, state = trainer.args, trainer.state
    offered = gather_object([row[PROMPT_KEY] for row in inputs])[:: trainer.num_generations]
    ctx = Context(
        step=state.global_step,
        total_steps=state.max_steps,
        groups=args.generation_batch_size // trainer.num_generations,
        group_size=trainer.num_generations,
        max_tokens=trainer.max_completion_length,
        prompts=trainer.prompts,
        offered=offered,
        columns=trainer.dataset_columns,
        version=state.global_step,
        seed=args.seed,
    )
    engine = LockStep(
        trainer,
        state.global_step,
        chunk=args.generation_chunk,
        own_temperatures=bool(parts["temperature"]),
        report_logp="logp_rollout" in parts.requires,
    )
    program = rollout_program(parts, ctx) if trainer.accelerator.is_main_process else None
    packed: list[RolloutBatch] = []
    shared = "rollout" in parts.requires

    def logged(r: Rollout) -> dict[str, Any] | None:
        kept = {name: r.extras[name] for name in trainer.needs.supplied if name in r.extras}
        return engine.logged.get((r.group, r.slot), kept or None)

    def finish(groups: list[Group]) -> dict[str, Any]:
        batch = pack(groups, version=ctx.version, step=ctx.step, total_steps=ctx.total_steps, seed=ctx.seed)
        packed.append(batch)
        names = trainer.component_names
        components = [[r.components.get(name, math.nan) for name in names] for r in batch.rollout]
        return {
            "columns": {name: column for name, column in batch.items() if name != "rollout" or shared},
            "components": torch.tensor(components, dtype=torch.float32).reshape(batch.size, len(names)),
            "logged": [logged(r) for r in batch.rollout],
            "lengths": [len(r) for r in batch.rollout],
            "teacher_contexts": [r.teacher_context for r in batch.rollout],
            "metrics": dict(ctx.metrics),
        }

    result = engine.run(program, finish)
    device = trainer.accelerator.device
    columns = result["columns"] | ({"rollout": packed[0].rollout} if packed else {})
    batch = RolloutBatch(columns, step=ctx.step, total_steps=ctx.total_steps, seed=ctx.seed).to(device)
    unit = math.lcm(trainer.accelerator.num_processes * args.steps_per_generation, trainer.num_generations)
    per_rank = -(-batch.size // unit) * unit // trainer.accelerator.num_processes
    names = ("lengths", "teacher_contexts", "components", "logged", "metrics")
    made = Rollouts(batch, per_rank, **{name: result[name] for name in names})
    made.components = made.components.to(device)
    return made, ctx


def as_rollout_func_output(trainer: RLXTrainer, made: Rollouts, rows: range) -> dict[str, Any]:
    """This rank's rows as a `rollout_func` returns them; padding is one masked end-of-sequence token."""
    batch, eos = made.batch, trainer.eos_token_ids[0]
    out: dict[str, Any] = {"prompt_ids": [], "completion_ids": [], "env_mask": [], "logprobs": []}
    for row in rows:
        real = row < batch.size
        source = row if real else 0
        n = made.lengths[source] if real else 0
        out["prompt_ids"].append(list(batch.prompt_ids[source]))
        out["completion_ids"].append(batch.response_ids[source, :n].tolist() if n else [eos])
        out["env_mask"].append(batch.response_mask[source, :n].int().tolist() if n else [0])
        out["logprobs"].append(batch.logp_rollout[source, :n].tolist() if n else [math.nan])
    if not trainer.use_vllm:
        out["logprobs"] = None
    return out
