"""`MeasuredTrainer`: the trainer behind `rlx run`; it counts tokens and records what comparisons and diagnoses read."""

from __future__ import annotations

import functools
import time
from dataclasses import dataclass
from typing import Any

import torch
from accelerate.utils import gather_object
from transformers import TrainerCallback

from ...core.batch import RolloutBatch
from ..measures import batch_measures, prompts_hash, shares, update_tokens
from .columns import gather_rows, response_mask, token_columns
from .inputs import PROMPT_KEY
from .profile import column_names
from .trainer import RLXTrainer

MAX_DOMAINS = 32
"""Shares are recorded for a `domain` column with at most this many values."""


@dataclass
class Spent:
    """What a run has spent so far, all ranks together.

    generated        tokens sampled, those of rollouts that were dropped later included
    update           tokens that an optimizer step gave a weight, once for each pass over them
    rollout_seconds  time in the engine (this rank's)
    """

    generated: int = 0
    update: int = 0
    rollout_seconds: float = 0.0


class MeasuredTrainer(RLXTrainer):
    """`RLXTrainer` with a record of each generation batch; training is the parent's, with and without plug-ins.

    spent     tokens and time so far
    measured  numbers of the last generation batch: hosts/measures.py, domain shares, `prompts`
    """

    def __init__(self, *args: Any, **kwargs: Any):
        self.spent = Spent()
        self.measured: dict[str, float] = {}
        self._sampled = 0
        super().__init__(*args, **kwargs)

    def _calculate_rewards(self, inputs: Any, prompts: Any, completions: Any, completion_ids_list: Any) -> Any:
        rewards = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        if self.parts is None and self.model.training:
            self.components = rewards
        return rewards

    def _generate_single_turn(self, prompt_ids: Any, *args: Any, **kwargs: Any) -> Any:
        started = time.monotonic()
        completion_ids, logprobs = super()._generate_single_turn(prompt_ids, *args, **kwargs)
        if self.model.training:
            self._sampled += sum(map(len, completion_ids))
            self.spent.rollout_seconds += time.monotonic() - started
        return completion_ids, logprobs

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        out = super()._generate_and_score_completions(inputs)
        if not self.model.training:
            return out
        sampled, self._sampled = self._sampled or int(response_mask(out).sum()), 0  # a rollout_func samples by itself
        self.spent.generated += int(self._sum_over_ranks(torch.tensor(sampled, device=self.accelerator.device)))
        if self.parts is None:
            batch = self._plain_batch(inputs, out)
        else:
            assert self._prepared is not None
            batch = self._prepared
        passes = self.num_iterations * self._share_of_updates_left()
        self.spent.update += round(update_tokens(batch) * passes)
        self.measured = batch_measures(batch) | self._domains(batch)
        if (fresh := 1 - self.measured["tokens/stale"]) > 0:
            self.measured["tokens/uses"] = self.num_iterations / fresh
        self.measured["prompts"] = prompts_hash(self._prompts(out))
        return out

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        """As the parent's, which checks for the end after a step: a run resumed at its end would make one too many."""
        if self.control.should_training_stop or self.state.global_step >= self.state.max_steps:
            self.control.should_training_stop = True
            return
        super()._run_epoch(*args, **kwargs)

    def _plain_batch(self, inputs: list[dict[str, Any]], out: dict[str, Any]) -> RolloutBatch:
        """The rows of a run without plug-ins, all ranks', in the vocabulary of the signal table."""
        columns: dict[str, Any] = token_columns(out, self.eos_token_ids)
        columns["advantages"] = columns["response_mask"] * out["advantages"].reshape(len(out["advantages"]), -1)
        columns["loss_weight"] = columns["response_mask"].float()
        columns[PROMPT_KEY] = [row.get(PROMPT_KEY) for row in inputs]
        columns["domain"] = [row.get("domain") for row in inputs]
        columns = gather_rows(self.accelerator, columns)
        rewards = (self.components * self.reward_weights.to(self.components.device)).nansum(1)
        columns["rewards"] = torch.where(torch.isnan(self.components).all(1), torch.nan, rewards)
        columns["group"] = torch.arange(len(rewards), device=rewards.device) // self.num_generations
        return RolloutBatch(columns)

    def _share_of_updates_left(self) -> float:
        """Share of a generation batch's optimizer steps that the run still makes."""
        steps = self.args.steps_per_generation * self.num_iterations / self.args.gradient_accumulation_steps
        return min(1.0, (self.state.max_steps - self.state.global_step) / steps)

    @functools.cached_property
    def _domain_targets(self) -> dict[str, float]:
        """Shares of the training data by its `domain` column; empty without one."""
        if "domain" not in column_names(self.train_dataset) or not hasattr(self.train_dataset, "__len__"):
            return {}
        found = shares(self.train_dataset["domain"])
        return found if len(found) <= MAX_DOMAINS else {}

    def _domains(self, batch: RolloutBatch) -> dict[str, float]:
        if not self._domain_targets:
            return {}
        if self.parts is None:
            seen = batch.domain
        else:
            seen = [self.dataset_row(key)["domain"] for key in batch.prompt_key]
        found = shares(seen)
        out = {f"domain_share/{name}": found.get(name, 0.0) for name in self._domain_targets}
        return out | {f"domain_target/{name}": share for name, share in self._domain_targets.items()}

    def _prompts(self, out: dict[str, Any]) -> list[tuple[int, ...]]:
        """The different prompts of the batch, all ranks'."""
        rows = zip(out["prompt_ids"].tolist(), out["prompt_mask"].tolist())
        mine = sorted({tuple(i for i, kept in zip(ids, mask) if kept) for ids, mask in rows})
        return gather_object(mine) if self.accelerator.num_processes > 1 else mine


class TokenBudget(TrainerCallback):
    """Ends training after the generation batch in which a number of tokens is reached."""

    def __init__(self, trainer: MeasuredTrainer, *, generated: int | None = None, update: int | None = None):
        self.trainer, self.generated, self.update = trainer, generated, update

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.on_step_end(args, state, control)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        updates = args.steps_per_generation * args.num_iterations // args.gradient_accumulation_steps
        if state.global_step % max(1, updates):
            return
        spent = self.trainer.spent
        if self.generated is not None and spent.generated >= self.generated:
            control.should_training_stop = True
        if self.update is not None and spent.update >= self.update:
            control.should_training_stop = True
