"""The signal table of a generation batch, all ranks' rows: from rows TRL generated, or from those of the program."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ...core.batch import RolloutBatch
from ...core.config import Parts
from ...core.errors import DataError
from ...core.randomness import hash_bits
from ..signals import OPTION, TOP_TOKENS, VALUES, add_supplied, per_token, row_column, row_name, top_columns
from .columns import fit, gather_rows, log_probs, response_mask, token_columns
from .forward import forward_columns
from .inputs import PROMPT_KEY
from .profile import ALWAYS, LIKELIEST, column_names
from .rollouts import Rollouts

if TYPE_CHECKING:
    from .trainer import RLXTrainer

SUCCESS = 0.5
"""A row is `correct` if its raw reward is above this."""

_BEFORE_LOSS = ("reward", "advantage", "correction", "aggregate", "distill_aggregate", "selector", "auxiliary")


@dataclass(frozen=True)
class Needs:
    """What the parts read, so that nothing else is computed.

    logp_old, entropy   before the loss, where the parent computes neither by itself
    logp_rollout, logp_behavior, logp_teacher, logp_prox   anywhere
    likeliest           signals made of likeliest tokens, anywhere
    values              of a value model: `values`, `value_prior`
    dataset, supplied   columns of the dataset, and fields named in `rollout_signals`, that become columns of the batch
    per_token           those of `supplied` with one entry per response token
    """

    logp_old: bool
    entropy: bool
    logp_rollout: bool
    logp_behavior: bool
    logp_teacher: bool
    logp_prox: bool
    likeliest: frozenset[str]
    values: frozenset[str]
    dataset: tuple[str, ...]
    supplied: tuple[str, ...]
    per_token: frozenset[str]

    @classmethod
    def of(cls, parts: Parts, dataset: Any, rollout_signals: Iterable[str] = ()) -> Needs:
        early = [p for kind in _BEFORE_LOSS for p in parts[kind]] + parts.rollout
        before_loss = set().union(*(p.requires for p in early), *(p.corrects for p in parts["correction"]))
        supplied = parts.requires & frozenset(rollout_signals)
        columns = (parts.requires & frozenset(column_names(dataset))) - ALWAYS - supplied
        anywhere = (parts.requires | before_loss) - supplied - columns
        return cls(
            logp_old=bool(before_loss & {"logp_old"}) or bool(anywhere & {"logp_rollout", "logp_behavior"}),
            entropy="entropy" in before_loss,
            logp_rollout="logp_rollout" in anywhere,
            logp_behavior="logp_behavior" in anywhere,
            logp_teacher="logp_teacher" in anywhere,
            logp_prox="logp_prox" in anywhere,
            likeliest=anywhere & LIKELIEST,
            values=anywhere & VALUES,
            dataset=tuple(sorted(columns)),
            supplied=tuple(sorted(supplied)),
            per_token=per_token(parts) & supplied,
        )


def generated_batch(
    trainer: RLXTrainer, inputs: list[dict[str, Any]], out: dict[str, Any], empty_rows: list[int]
) -> RolloutBatch:
    """Rows that the parent generated: every `num_generations` are a group; `empty_rows` have no token of the model."""
    device, needs = trainer.accelerator.device, trainer.needs
    columns: dict[str, Any] = token_columns(out, trainer.eos_token_ids) | forward_columns(trainer, out)
    if trainer.reports_top_tokens:
        columns |= top_columns(trainer.top_tokens, out["completion_ids"].shape[1], device)
    if empty_rows:
        columns["response_mask"][empty_rows] = False
        columns["finished"][empty_rows] = True
    columns[PROMPT_KEY] = [row.get(PROMPT_KEY, "") for row in inputs]  # an environment may do without a dataset
    columns = gather_rows(trainer.accelerator, columns)
    keys = columns[PROMPT_KEY]
    n, group_size, step = len(keys), trainer.num_generations, trainer.state.global_step
    names = [f"{key}#{step}.{i // group_size}" for i, key in enumerate(keys)]
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
    given: dict[str, list[Any]] = {name: [row[name] for row in inputs] for name in needs.dataset}
    given |= {name: _reported(trainer, inputs, name) for name in needs.supplied}
    given = gather_rows(trainer.accelerator, {**given, _LENGTHS: trainer.response_lengths})
    lengths = given.pop(_LENGTHS)
    columns |= {name: row_column(given.pop(name), device) for name in needs.dataset}
    add_supplied(columns, given, lengths, needs.per_token)
    return RolloutBatch(columns, step=step, total_steps=trainer.state.max_steps, seed=trainer.args.seed)


def program_batch(trainer: RLXTrainer, made: Rollouts, out: dict[str, Any]) -> RolloutBatch:
    """The program's rows with the log-probs the parent computed for them; padding rows are left out."""
    batch, size = made.batch, made.batch.size
    local = log_probs(out) | forward_columns(trainer, out) | {"response_mask": response_mask(out)}
    local.pop("logp_rollout", None)
    forward = gather_rows(trainer.accelerator, local)
    made_width, forward_width = batch.response_ids.shape[1], forward["response_mask"].shape[1]
    width = max(made_width, forward_width)
    columns = {name: fit(c, width, made_width) for name, c in batch.items()}
    forward = {name: fit(c[:size], width, forward_width) for name, c in forward.items()}
    forward["response_mask"] = forward["response_mask"] & columns["response_mask"]  # mask_truncated_completions
    columns |= forward
    for name in set(trainer.needs.dataset) - set(columns):
        values = [trainer.dataset_row(key)[name] for key in batch.prompt_key]
        columns[name] = row_column(values, trainer.accelerator.device)
    supplied = {name: _logged(made, name) for name in trainer.needs.supplied}
    add_supplied(columns, supplied, made.lengths, trainer.needs.per_token)
    columns.setdefault("correct", batch.rewards > SUCCESS)
    if trainer.reports_top_tokens:
        if not TOP_TOKENS <= set(columns):  # no row was sampled in this step
            columns |= top_columns([None] * size, width, batch.device)
    elif (name := "rollout_top_logp") in trainer.needs.likeliest:  # the engine's own where it sampled as is scored
        alike = ~batch.helped & (batch.temperature == trainer.temperature)
        alike = (alike[:, None] & (columns["staleness"] == 0))[..., None]
        columns[name] = torch.where(alike, columns[name], torch.nan)
    if trainer.needs.logp_behavior:
        old, recorded = columns["logp_old"], columns.get("logp_behavior")
        columns["logp_behavior"] = old if recorded is None else torch.where(torch.isnan(recorded), old, recorded)
    return RolloutBatch(columns, step=batch.step, total_steps=batch.total_steps, seed=batch.seed)


_LENGTHS = "response lengths"


def _reported(trainer: RLXTrainer, inputs: Sequence[dict[str, Any]], name: str) -> list[Any]:
    """This rank's values of a field that a reward function reported with `log_extra`, or a `rollout_func` returned."""
    if name in trainer.reported:
        values = trainer.reported[name]
        if len(values) != len(inputs):
            raise DataError(f"log_extra({name!r}, ...) told {len(values)} values in all for {len(inputs)} completions")
        return list(values)
    check_fields(inputs, [name], all_missing=True)
    return [row[name] for row in inputs]


def check_fields(inputs: Sequence[dict[str, Any]], names: Iterable[str], *, all_missing: bool = False) -> None:
    """DataError where a `rollout_func` returned a field for some completions only (`all_missing`: or for none)."""
    for name in names:
        without = [i for i, row in enumerate(inputs) if name not in row]
        if without and (all_missing or len(without) < len(inputs)):
            key = inputs[without[0]].get(PROMPT_KEY, "")
            raise DataError(_missing(name, f"completion {without[0]} (prompt {key!r})"))


def _logged(made: Rollouts, name: str) -> list[Any]:
    """Values that a reward function reported with `log_extra` for the program's rows.

    None for a row that a part made by itself, which no reward function has seen.
    """
    for i, row in enumerate(made.logged):
        if row is not None and name not in row:
            raise DataError(_missing(name, row_name(made.batch.prompt_key, i)))
    return [None if row is None else row[name] for row in made.logged]


def _missing(name: str, where: str) -> str:
    return (
        f"{OPTION} names {name!r}, but {where} has no such field: return it from your rollout_func, one entry per"
        " completion, or report it in a reward function with log_extra"
    )
