"""From TRL's rollout dictionary to the signal table, and from the prepared table to extra keys of the dictionary."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor

from ...core.batch import RolloutBatch
from ..signals import indices

PREFIX = "rlx/"
"""Prepared columns travel through TRL's shuffling and splitting as extra keys `rlx/<column>` of the dictionary."""

LOG_PROBS = {
    "logp_old": "old_per_token_logps",
    "logp_ref": "ref_per_token_logps",
    "logp_rollout": "sampling_per_token_logps",
}
"""Signal -> TRL's key."""

RESPONSE_KEYS = (
    *("completion_ids", "completion_mask", "tool_mask", "advantages", "importance_sampling_ratio"),
    *LOG_PROBS.values(),
)
"""TRL's [B,T] keys over response tokens, those that shrink when rows are cut."""


def response_mask(out: Mapping[str, Tensor]) -> Tensor:
    """[B,T] bool: TRL's loss mask, completion_mask without tokens the model did not write."""
    mask = out["completion_mask"].bool()
    return mask & out["tool_mask"].bool() if "tool_mask" in out else mask


def token_columns(out: Mapping[str, Tensor], eos: Sequence[int]) -> dict[str, Tensor]:
    """Columns that every row of TRL's dictionary has: ids, masks, turns, log-probs; `finished` [B]."""
    mask = response_mask(out)
    ids = out["completion_ids"]
    before = torch.zeros_like(mask)
    before[:, 1:] = mask[:, :-1]
    turns = torch.where(mask, (mask & ~before).cumsum(1) - 1, -1)
    length = out["completion_mask"].sum(1)
    last = ids.gather(1, (length - 1).clamp(min=0)[:, None])[:, 0]
    columns = {
        "response_ids": ids,
        "response_mask": mask,
        "hint_mask": torch.zeros_like(mask),
        "turn_ids": turns,
        "segment_ids": turns.clone(),
        "staleness": torch.zeros_like(ids),
        "finished": (length > 0) & torch.isin(last, torch.tensor(list(eos), device=ids.device)),
    }
    return columns | log_probs(out)


def log_probs(out: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The log-probability columns that TRL's dictionary has."""
    return {signal: out[key] for signal, key in LOG_PROBS.items() if key in out}


def gather_rows(accelerator: Accelerator, columns: Mapping[str, Any]) -> dict[str, Any]:
    """The columns with the rows of all ranks, in rank order; token columns padded on the right to one width."""
    if accelerator.num_processes == 1:
        return dict(columns)
    out: dict[str, Any] = {}
    for name in sorted(columns):
        column = columns[name]
        if not isinstance(column, Tensor):
            out[name] = gather_object(list(column))
            continue
        sent = column.to(torch.uint8) if column.dtype == torch.bool else column  # padding turns bool into int64
        if column.ndim > 1:
            sent = accelerator.pad_across_processes(sent, dim=1)
        out[name] = accelerator.gather(sent.contiguous()).to(column.dtype)
    return out


def fit(column: Any, width: int, old_width: int) -> Any:
    """A [B,T,...] column of `old_width` tokens cut or padded on the right to `width`; anything else as it is."""
    if not isinstance(column, Tensor) or column.ndim < 2 or column.shape[1] != old_width or width == old_width:
        return column
    if width < old_width:
        return column[:, :width]
    padding = column.new_zeros(column.shape[0], width - old_width, *column.shape[2:])
    return torch.cat([column, padding], dim=1)


def own_rows(batch: RolloutBatch, total: int, mine: slice, width: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Columns of this rank's rows for TRL's dictionary, and the values that belong to the whole batch.

    `batch` is a prepared batch, `batch.row` the global row of each of its rows among `total`. Rows it lacks (dropped,
    or padding) get zeros (no mask, no weight, no count) and group -1. `width` is the response width of this rank's
    dictionary.
    """
    rows, old_width = batch.row, batch.response_mask.shape[1]
    keys: dict[str, Any] = {}
    values: dict[str, Any] = {}
    position: dict[int, int] | None = None
    for name, column in batch.items():
        if name in ("rollout", "prompt_ids"):
            continue
        if isinstance(column, Tensor) and column.ndim > 0 and len(column) == batch.size:
            full = column.new_full((total, *column.shape[1:]), -1 if name == "group" else 0)
            full[rows] = column
            keys[PREFIX + name] = fit(full[mine], width, old_width)
        elif isinstance(column, list) and len(column) == batch.size:
            if position is None:
                position = {row: i for i, row in enumerate(rows.tolist())}
            keys[PREFIX + name] = [
                column[position[row]] if row in position else None for row in range(mine.start, mine.stop)
            ]
        else:
            values[name] = column
    return keys, values


def micro_batch(inputs: Mapping[str, Any], values: Mapping[str, Any], like: RolloutBatch) -> RolloutBatch:
    """The extra keys of one micro-batch as a batch again; `like` gives step, total_steps and seed."""
    columns = {name.removeprefix(PREFIX): indices(v) for name, v in inputs.items() if name.startswith(PREFIX)}
    return RolloutBatch({**values, **columns}, step=like.step, total_steps=like.total_steps, seed=like.seed)


def cut_responses(inputs: Mapping[str, Any], length: int) -> dict[str, Any]:
    """TRL's dictionary with every response shortened to `length` tokens, extra keys included."""
    width, prompt = inputs["completion_ids"].shape[1], inputs["prompt_ids"].shape[1]
    out = dict(inputs)
    for name, value in inputs.items():
        if name in RESPONSE_KEYS or name.startswith(PREFIX):
            out[name] = fit(value, length, width)
        elif name in ("token_type_ids", "mm_token_type_ids"):
            out[name] = value[:, : prompt + length]
    return out
