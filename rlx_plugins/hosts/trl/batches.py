"""The signal table of a generation batch, all ranks' rows: from rows TRL generated, or from those of the program."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from trl.models.utils import disable_gradient_checkpointing

from ...core.batch import RolloutBatch
from ...core.config import Parts
from ...core.randomness import hash_bits
from .columns import LOG_PROBS, dataset_column, fit, gather_rows, log_probs, response_mask, token_columns
from .inputs import PROMPT_KEY
from .profile import ALWAYS, column_names
from .rollouts import Rollouts

if TYPE_CHECKING:
    from .trainer import RLXTrainer

SUCCESS = 0.5
"""A row is `correct` if its raw reward is above this."""

MULTIMODAL = (
    "pixel_values image_grid_thw num_images pixel_attention_mask spatial_shapes num_tiles image_sizes token_type_ids"
    " mm_token_type_ids image_position_ids"
).split()
"""Keys of TRL's dictionary that its log-prob method takes as arguments of the same name."""

_BEFORE_LOSS = ("reward", "advantage", "correction", "aggregate", "distill_aggregate", "selector", "auxiliary")


@dataclass(frozen=True)
class Needs:
    """What the parts read, so that nothing else is computed.

    logp_old, entropy   before the loss, where the parent computes neither by itself
    logp_rollout, logp_behavior, logp_teacher, logp_prox   anywhere
    dataset             columns of the dataset, and fields of a `rollout_func`, that become columns of the batch
    """

    logp_old: bool
    entropy: bool
    logp_rollout: bool
    logp_behavior: bool
    logp_teacher: bool
    logp_prox: bool
    dataset: tuple[str, ...]

    @classmethod
    def of(cls, parts: Parts, dataset: Any, rollout_signals: Iterable[str] = ()) -> Needs:
        early = [p for kind in _BEFORE_LOSS for p in parts[kind]] + parts.rollout
        before_loss = set().union(*(p.requires for p in early), *(p.corrects for p in parts["correction"]))
        anywhere = parts.requires | before_loss
        return cls(
            logp_old=bool(before_loss & {"logp_old"}) or bool(anywhere & {"logp_rollout", "logp_behavior"}),
            entropy="entropy" in before_loss,
            logp_rollout="logp_rollout" in anywhere,
            logp_behavior="logp_behavior" in anywhere,
            logp_teacher="logp_teacher" in anywhere,
            logp_prox="logp_prox" in anywhere,
            dataset=tuple(sorted((parts.requires & {*column_names(dataset), *rollout_signals}) - ALWAYS)),
        )


def generated_batch(
    trainer: RLXTrainer, inputs: list[dict[str, Any]], out: dict[str, Any], empty_rows: list[int]
) -> RolloutBatch:
    """Rows that the parent generated: every `num_generations` are a group; `empty_rows` have no token of the model."""
    device, needs = trainer.accelerator.device, trainer.needs
    columns: dict[str, Any] = token_columns(out, trainer.eos_token_ids) | forward_columns(trainer, out)
    if empty_rows:
        columns["response_mask"][empty_rows] = False
        columns["finished"][empty_rows] = True
    columns[PROMPT_KEY] = [row.get(PROMPT_KEY, "") for row in inputs]  # an environment may do without a dataset
    for name in needs.dataset:
        columns[name] = dataset_column([row[name] for row in inputs], device)
    columns = gather_rows(trainer.accelerator, columns)
    n, group_size, step = len(columns[PROMPT_KEY]), trainer.num_generations, trainer.state.global_step
    names = [f"{key}#{step}.{i // group_size}" for i, key in enumerate(columns[PROMPT_KEY])]
    rewards = (trainer.components * trainer.reward_weights.to(device)).nansum(1)
    rewards = torch.where(torch.isnan(trainer.components).all(1), torch.nan, rewards)
    columns |= {
        "group": torch.arange(n, device=device) // group_size,
        "row_id": torch.tensor([hash_bits(name, i % group_size) for i, name in enumerate(names)], device=device),
        "rewards": rewards,
        "reward_components": trainer.components,
        "component_names": tuple(trainer.component_names),
        "keep": torch.ones(n, dtype=torch.bool, device=device),
        "helped": torch.zeros(n, dtype=torch.bool, device=device),
        "correct": rewards > SUCCESS,
        "temperature": torch.full((n,), trainer.temperature, device=device),
        "propensity": torch.ones(n, device=device),
        "source": ["fresh"] * n,
    }
    if needs.logp_behavior:
        columns["logp_behavior"] = columns["logp_old"]
    if needs.logp_rollout:
        columns.setdefault("logp_rollout", columns["logp_old"])
    return RolloutBatch(columns, step=step, total_steps=trainer.state.max_steps, seed=trainer.args.seed)


def program_batch(trainer: RLXTrainer, made: Rollouts, out: dict[str, Any]) -> RolloutBatch:
    """The program's rows with the log-probs the parent computed for them; padding rows are left out."""
    batch, size = made.batch, made.batch.size
    local = log_probs(out) | forward_columns(trainer, out) | {"response_mask": response_mask(out)}
    local.pop("logp_rollout", None)
    forward = gather_rows(trainer.accelerator, local)
    width = max([batch.response_ids.shape[1], *(c.shape[1] for c in forward.values())])
    columns = {name: fit(c, width, batch.response_ids.shape[1]) for name, c in batch.items()}
    forward = {name: fit(c[:size], width, c.shape[1]) for name, c in forward.items()}
    forward["response_mask"] = forward["response_mask"] & columns["response_mask"]  # mask_truncated_completions
    columns |= forward
    for name in set(trainer.needs.dataset) - set(columns):
        values = [trainer.dataset_row(key)[name] for key in batch.prompt_key]
        columns[name] = dataset_column(values, trainer.accelerator.device)
    columns.setdefault("correct", batch.rewards > SUCCESS)
    if trainer.needs.logp_behavior:
        old, recorded = columns["logp_old"], columns.get("logp_behavior")
        columns["logp_behavior"] = old if recorded is None else torch.where(torch.isnan(recorded), old, recorded)
    return RolloutBatch(columns, step=batch.step, total_steps=batch.total_steps, seed=batch.seed)


def forward_columns(trainer: RLXTrainer, out: dict[str, Any]) -> dict[str, Tensor]:
    """logp_old, entropy, logp_teacher, logp_prox [B,T] where a part reads them and the parent has not computed them."""
    columns: dict[str, Tensor] = {}
    if trainer.teacher is not None and trainer.needs.logp_teacher:
        columns["logp_teacher"] = trainer.teacher.logp(out)
    if trainer.averaged is not None and trainer.needs.logp_prox:
        columns["logp_prox"] = trainer.averaged.logp(out)
    missing_old = trainer.needs.logp_old and LOG_PROBS["logp_old"] not in out
    if not missing_old and not trainer.needs.entropy:
        return columns
    checkpointing = trainer.args.gradient_checkpointing_kwargs
    with torch.no_grad(), disable_gradient_checkpointing(trainer.model, checkpointing):
        logp, entropy, _ = trainer._get_per_token_logps_and_entropies(
            trainer.model,
            torch.cat([out["prompt_ids"], out["completion_ids"]], 1),
            torch.cat([out["prompt_mask"], out["completion_mask"]], 1),
            out["completion_ids"].shape[1],
            batch_size=trainer.args.per_device_train_batch_size,
            compute_entropy=trainer.needs.entropy,
            **{name: out[name] for name in MULTIMODAL if name in out},
        )
    if trainer.needs.entropy:
        columns["entropy"] = entropy
    if missing_old:
        columns["logp_old"] = out[LOG_PROBS["logp_old"]] = logp
    return columns
