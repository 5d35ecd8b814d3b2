"""From verl's nested fields to the signal table, and from the prepared table to fields that workers receive."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from tensordict import TensorDict
from tensordict.tensorclass import NonTensorData, NonTensorStack
from torch import Tensor

from ...core.batch import RolloutBatch
from ..signals import indices

PREFIX = "rlx/"
"""Prepared columns travel to the training workers as fields `rlx/<column>` of verl's TransferQueue."""

TOTAL = "rlx/total/"
"""`rlx/total/<term>` [B]: the count of a loss term over the optimizer step the row belongs to."""

RUN = "rlx_run"
"""Non-tensor entry of every micro-batch: step, total_steps, seed, values of the whole batch, state of the advantage."""

ASKED, CONFIDENCE = "rlx_asked", "rlx_confidence"
"""Non-tensor entry of a batch that asks the training workers for a signal only, and the field they answer with."""

LOG_PROBS = {
    "logp_old": "old_log_probs",
    "logp_ref": "ref_log_prob",
    "logp_rollout": "rollout_log_probs",
    "entropy": "entropy",
}
"""Signal -> verl's field over response tokens."""

CARRIED = {"response_ids": "responses", "logp_old": "old_log_probs", "logp_ref": "ref_log_prob"}
"""Columns a worker reads from verl's own fields instead of a copy."""

CUT = ("responses", "response_mask", "loss_mask", *LOG_PROBS.values())
"""verl's fields over response tokens that shrink when rows are cut."""


def lengths(nested: Tensor) -> Tensor:
    """[B] int64: tokens of each row of a nested tensor [B, T_i]."""
    return nested.offsets().diff()


def padded(nested: Tensor, width: int | None = None, fill: float = 0) -> Tensor:
    """[B, width, ...] from a nested tensor [B, T_i, ...], padded on the right; a tensor that is not nested as it is.

    `width`: the longest row unless given; longer rows are an error.
    """
    if not nested.is_nested:
        return nested
    rows = lengths(nested)
    width = max(1, int(rows.max())) if width is None else width
    values = nested.values()
    there = torch.arange(width, device=rows.device)[None] < rows[:, None]
    out = values.new_full((len(rows), width, *values.shape[1:]), fill)
    return out.masked_scatter(there.reshape(*there.shape, *[1] * (values.ndim - 1)), values)


def nest(column: Tensor, rows: Tensor) -> Tensor:
    """A nested tensor [B, T_i, ...] of the first `rows[i]` entries of every row of [B, T, ...]."""
    there = torch.arange(column.shape[1], device=column.device)[None] < rows[:, None]
    offsets = torch.nn.functional.pad(rows.cumsum(0), (1, 0))
    return torch.nested.nested_tensor_from_jagged(column[there], offsets)


def as_list(field: Any) -> list[Any]:
    """A non-tensor field as a list of plain values, one per row."""
    return [getattr(value, "data", value) if isinstance(value, NonTensorData) else value for value in field]


def turns(mask: Tensor) -> Tensor:
    """[B,T] int64: number of the model turn a token belongs to, -1 where `mask` is off."""
    before = torch.zeros_like(mask)
    before[:, 1:] = mask[:, :-1]
    return torch.where(mask, (mask & ~before).cumsum(1) - 1, -1)


def token_columns(data: TensorDict, eos: Sequence[int]) -> dict[str, Tensor]:
    """Columns over response tokens of rows that verl generated: ids, masks, turns, log-probs; `finished` [B]."""
    rows = lengths(data["responses"])
    ids = padded(data["responses"])
    mask = padded(data["response_mask"]).bool()
    turn = turns(mask)
    last = ids.gather(1, (rows - 1).clamp(min=0)[:, None])[:, 0]
    columns = {
        "response_ids": ids,
        "response_mask": mask,
        "hint_mask": torch.zeros_like(mask),
        "turn_ids": turn,
        "segment_ids": turn.clone(),
        "finished": torch.isin(last, torch.tensor(list(eos), device=ids.device)) & (rows > 0),
    }
    if "teacher_logprobs" in data.keys():
        columns["logp_teacher"] = teacher_log_probs(data, ids.shape[1])
    return columns | log_probs(data, ids.shape[1])


def log_probs(data: TensorDict, width: int) -> dict[str, Tensor]:
    """The log-probability and entropy columns [B, width] that verl's data has."""
    return {signal: padded(data[field], width) for signal, field in LOG_PROBS.items() if field in data.keys()}


def teacher_log_probs(data: TensorDict, width: int) -> Tensor:
    """[B, width] log-probs of the response tokens from verl's teacher, which scores the whole sequence."""
    values = data["teacher_logprobs"].values()
    values = values.reshape(len(values), -1)[:, 0][response_positions(data)]
    there = torch.arange(width, device=values.device)[None] < lengths(data["responses"])[:, None]
    return values.new_zeros(there.shape).masked_scatter(there, values)


def logp_behavior(columns: Mapping[str, Any], recorded: Tensor | None = None) -> Tensor:
    """[B,T] log-probs under the policy and context that sampled, as far as they are known.

    What a part recorded comes first; for tokens of an older policy version the engine's log-probs stand, and for all
    others the trainer's own at the start of the step.
    """
    out = columns["logp_old"]
    if "logp_rollout" in columns:
        known = (columns["staleness"] > 0) & ~torch.isnan(columns["logp_rollout"])
        out = torch.where(known, columns["logp_rollout"].to(out.dtype), out)
    return out if recorded is None else torch.where(torch.isnan(recorded), out, recorded.to(out.dtype))


def worker_fields(
    batch: RolloutBatch, place: Tensor, rows: Tensor, wanted: Callable[[str], bool]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Fields for the training workers, and the values that belong to the whole batch.

    batch   a prepared batch of real rows
    place   [B] row of verl's batch that each row of `batch` is
    rows    [N] response tokens of each row of verl's batch; rows that `batch` lacks (padding, dropped) get zeros
    wanted  which columns are sent
    """
    shape, n = batch.response_mask.shape, len(rows)
    fields: dict[str, Any] = {}
    values: dict[str, Any] = {}
    for name, column in batch.items():
        if not wanted(name):
            continue
        if isinstance(column, Tensor) and column.ndim > 0 and len(column) == batch.size:
            full = column.new_zeros(n, *column.shape[1:])
            full[place] = column
            fields[PREFIX + name] = nest(full, rows) if column.shape[:2] == shape else full
        elif isinstance(column, list) and len(column) == batch.size:
            listed: list[Any] = [None] * n
            for i, value in zip(place.tolist(), column):
                listed[i] = value
            fields[PREFIX + name] = listed
        else:
            values[name] = column
    return fields, values


def step_totals(counts: Mapping[str, Tensor], *, ranks: int, rows_per_step: int) -> dict[str, Tensor]:
    """Totals of every loss term for each row of verl's batch, on the batch's own order.

    verl gives each rank a contiguous share of the N rows and splits that share into mini-batches in order; an optimizer
    step is the mini-batch of that number on all ranks. `counts` are [N]; `rows_per_step` is over all ranks.
    """
    n = len(next(iter(counts.values())))
    per_rank, per_step = n // ranks, rows_per_step // ranks
    step = (torch.arange(n) % per_rank) // per_step
    out = {}
    for term, count in counts.items():
        sums = count.new_zeros(int(step.max()) + 1).index_add_(0, step.to(count.device), count)
        out[TOTAL + term] = sums[step]
    return out


def micro_batch(data: TensorDict) -> RolloutBatch:
    """The fields of one micro-batch as a batch again, every token column of the width of its longest response."""
    run = non_tensor(data, RUN)
    width = max(1, int(lengths(data["responses"]).max()))
    columns = dict(run["values"])
    for name in data.keys():
        if name.startswith(PREFIX) and not name.startswith(TOTAL):
            column = data.get(name)
            read = indices(padded(column, width)) if isinstance(column, Tensor) else as_list(column)
            columns[name.removeprefix(PREFIX)] = read
    for signal, field in CARRIED.items():
        if field in data.keys():
            columns[signal] = padded(data[field], width)
    return RolloutBatch(columns, step=run["step"], total_steps=run["total_steps"], seed=run["seed"])


def totals(data: TensorDict) -> dict[str, Tensor]:
    """The totals of the optimizer step of a micro-batch: all its rows say the same."""
    return {name.removeprefix(TOTAL): data[name][0] for name in data.keys() if name.startswith(TOTAL)}


def non_tensor(data: TensorDict, name: str) -> Any:
    """A non-tensor entry that holds for the whole batch."""
    value = data.get(name)
    return value.data if isinstance(value, NonTensorData) else value


def response_positions(data: TensorDict) -> Tensor:
    """[R] int64: places in the packed sequences [prompt | response] whose logits predict the response tokens."""
    prompt, response = lengths(data["prompts"]), lengths(data["responses"])
    ends = (prompt + response).cumsum(0)
    start = ends - response - 1
    row = torch.repeat_interleave(torch.arange(len(response), device=response.device), response)
    first = response.cumsum(0) - response
    return start[row] + torch.arange(len(row), device=row.device) - first[row]


def cut_rows(data: TensorDict, kept: Tensor) -> dict[str, Tensor]:
    """verl's fields with the response of row i shortened to its first `kept[i]` tokens (1 at least)."""
    prompt, response = lengths(data["prompts"]), lengths(data["responses"])
    short = torch.minimum(response, kept.clamp(min=1))
    out = {name: nest(padded(data[name]), short) for name in CUT if name in data.keys()}
    for name in ("input_ids", "position_ids"):
        out[name] = nest(padded(data[name]), prompt + short)
    return out


def fields_dict(fields: Mapping[str, Any], size: int) -> TensorDict:
    """A TensorDict of nested and plain tensors and lists, as TransferQueue takes it."""
    entries = {
        name: NonTensorStack.from_list([NonTensorData(v) for v in value]) if isinstance(value, list) else value
        for name, value in fields.items()
    }
    return TensorDict(entries, batch_size=size)


def reward_components(extra: Iterable[Mapping[str, Any]], names: Sequence[str]) -> Tensor:
    """[B,K] float32: the named entries of each row's reward information, NaN where a row has none."""
    rows = [[_number(info.get(name)) for name in names] for info in extra]
    return torch.tensor(rows, dtype=torch.float32).reshape(len(rows), len(names))


def _number(value: Any) -> float:
    return float("nan") if value is None else float(value)
