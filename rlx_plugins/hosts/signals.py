"""Signals that a user supplies: columns of the dataset, and fields of rollout code or of a reward function."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..core.batch import top_token_columns
from ..core.config import Parts
from ..core.errors import ConfigError, DataError
from ..core.host import BATCH_SIGNALS, TOKEN_SIGNALS
from ..core.trajectory import Top

PRIOR = "value_prior"
VALUES = frozenset({"values", PRIOR})
"""What a value model or a critic supplies: the expected return before each response token, and before the first."""

TOP = 5
"""Tokens whose probabilities add up to the signal `confidence`."""

TOP_TOKENS = frozenset({"rollout_top_ids", "rollout_top_logp"})
"""The rollout engine's likeliest tokens and their log-probs at the temperature it sampled with, [B,T,TOP_K]."""

TOP_K = 20
"""Tokens in them: PDM's number, and the most vLLM reports unless it is started with another `max_logprobs`."""

OPTION = "rollout_signals"
"""Name of the hosts' option that lists the fields of rollout code and reward functions to take as signals."""

OF_THE_HOST = BATCH_SIGNALS | frozenset(
    "logp_new logp_old logp_ref logp_prox logp_rollout logp_behavior entropy reward_components component_names"
    " prompt_ids rollout".split()
)
"""Signals that hosts make themselves, whatever a field of that name says."""

OF_MODEL_TOKENS = frozenset({"turn_ids", "segment_ids"})
"""Signals that are -1 outside response_mask."""


def check_names(option: str, names: Any) -> tuple[str, ...]:
    """The names listed under `option`; ConfigError if they are no list of names, or signals of the host's own."""
    if names is None:
        return ()
    if isinstance(names, str) or not all(isinstance(name, str) for name in names):
        raise ConfigError(f"{option}: expected names like [info_gain,confidence], got {names!r}")
    for name in names:
        if name in OF_THE_HOST:
            raise ConfigError(f"{option} names {name!r}, which the host makes itself; remove it or rename the field")
    return tuple(names)


def per_token(parts: Parts) -> frozenset[str]:
    """Signals of a run that hold one entry per response token."""
    return TOKEN_SIGNALS.union(*(part.token_signals for part in parts))


def top_tokens(ids: Sequence[Sequence[int]], logp: Sequence[Sequence[float | None]]) -> Top:
    """[n,TOP_K] int32 and float32 of what an engine reported at n tokens, likeliest first; None is unknown."""
    none, nan = [-1] * TOP_K, [float("nan")] * TOP_K
    listed = [[*row, *none][:TOP_K] for row in ids]
    values = [[*(nan[0] if x is None else x for x in row), *nan][:TOP_K] for row in logp]
    shape = (len(listed), TOP_K)
    return torch.tensor(listed, dtype=torch.int32).reshape(shape), torch.tensor(values).float().reshape(shape)


def top_columns(rows: Sequence[Top | None], width: int, device: torch.device | None = None) -> dict[str, Tensor]:
    """`rollout_top_ids` and `rollout_top_logp` [B,width,TOP_K] of rows (None: no token of theirs is known)."""
    known = [(i, 0, top) for i, top in enumerate(rows) if top is not None]
    columns = top_token_columns(known, (len(rows), width, TOP_K))
    return {name: column.to(device) for name, column in columns.items()}


def indices(column: Any) -> Any:
    """A column of ids, which travels as int32, as the int64 that indexing takes; any other as it is."""
    return column.long() if isinstance(column, Tensor) and column.dtype == torch.int32 else column


def row_column(values: Sequence[Any], device: torch.device | None = None) -> Any:
    """One value per row: a float32 tensor [B] where they are numbers (None: NaN), else the list."""
    if all(v is None or isinstance(v, (bool, int, float)) for v in values):
        return torch.tensor([float("nan") if v is None else float(v) for v in values], device=device)
    return list(values)


def token_column(
    name: str, rows: Sequence[Any], lengths: Sequence[int], width: int, where: Callable[[int], str]
) -> Tensor:
    """[B,width] or [B,width,K] from one list per row with an entry (a number or K numbers) per response token.

    None for a row or an entry is unknown. int64 padded with -1, bool with False, or float32 with NaN. DataError names
    the field and the row (`where(i)`) whose list is not as long as its response (`lengths[i]`).
    """
    found = [_entries(name, row, n, where, i) for i, (row, n) in enumerate(zip(rows, lengths))]
    known = [values for values in found if values is not None and len(values)]
    kinds = {values.dtype for values in known}
    dtype = kinds.pop() if len(kinds) == 1 and all(values is not None for values in found) else torch.float32
    fill: Any = {torch.bool: False, torch.int64: -1}.get(dtype, float("nan"))
    inner = {values.shape[1:] for values in known} or {torch.Size()}
    if len(inner) > 1:
        raise DataError(f"the field {name!r} has entries of different sizes: {', '.join(str(list(s)) for s in inner)}")
    out = torch.full((len(found), width, *inner.pop()), fill, dtype=dtype)
    for i, values in enumerate(found):
        if values is not None and len(values):
            out[i, : len(values)] = values.to(dtype)
    return out


def _entries(name: str, row: Any, n: int, where: Callable[[int], str], i: int) -> Tensor | None:
    """The entries of one row [n] or [n,K]: bool, int64 or float32; None where all are unknown."""
    if row is None:
        return None
    row = row.tolist() if hasattr(row, "tolist") else row
    given = len(row) if isinstance(row, (list, tuple)) else None
    if given != n:
        has = f"{given} entries" if given is not None else f"{row!r:.40}"
        raise DataError(
            f"the field {name!r} of {where(i)} has {has} for a response of {n} tokens; it takes a list with one entry"
            " per response token, tool output included"
        )
    try:
        values = torch.tensor([float("nan") if v is None else v for v in row])
    except (TypeError, ValueError) as error:
        raise DataError(f"the field {name!r} of {where(i)} does not hold numbers: {error}") from error
    return values if values.dtype in (torch.bool, torch.int64) else values.float()


def in_place_of(made: Tensor, given: Tensor) -> Tensor:
    """A user's token column [B,T] in the type of the one the host made; unknown entries are -1 (False in a mask)."""
    unknown = 0 if made.dtype == torch.bool else -1
    return torch.nan_to_num(given.to(made.device, torch.float64), nan=unknown).to(made.dtype)


def row_name(keys: Sequence[str], i: int) -> str:
    """A row of a batch with these prompt keys, for an error message."""
    return f"row {i} (prompt {keys[i]!r})"


def add_supplied(
    columns: dict[str, Any],
    fields: Mapping[str, Sequence[Any]],
    lengths: Sequence[int],
    token_signals: frozenset[str],
) -> None:
    """Put a user's fields (one value per row) into the table `columns`, in the place of the host's own.

    Signals per token become tensors; others a tensor [B] where they are numbers, else a list. lengths: response tokens.
    """
    where = functools.partial(row_name, columns["prompt_key"])
    mask: Tensor = columns["response_mask"]
    for name, values in fields.items():
        if name not in token_signals:
            columns[name] = row_column(values, mask.device)
            continue
        given = token_column(name, values, lengths, mask.shape[1], where).to(mask.device)
        if isinstance(columns.get(name), Tensor):
            given = in_place_of(columns[name], given)
        columns[name] = torch.where(mask, given, -1) if name in OF_MODEL_TOKENS else given
