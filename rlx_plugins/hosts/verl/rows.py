"""The signal table of rows that verl's own agent loops have generated and its reward workers scored."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from ...core.batch import RolloutBatch
from ...core.errors import DataError
from ...core.randomness import hash_bits
from ..signals import OPTION, add_supplied, row_column, row_name
from .columns import as_list, lengths, logp_behavior, padded, reward_components, token_columns
from .top_tokens import columns_of_rows

PROMPT_KEY = "prompt_key"
"""Column of the dataset that names a prompt across epochs, resumes and workers; else a hash of its messages does."""

SCORE = "score"
"""Entry of a reward function's dictionary that is the scalar reward itself."""

VERSIONS = "rlx_versions"
"""Entry of a row's extra fields: [tokens, version] of every run of response tokens, where several were sampled from."""

FIELDS = (
    "uid responses response_mask rm_scores rollout_log_probs old_log_probs ref_log_prob entropy extra_fields raw_prompt"
    " data_source extra_info"
).split()
"""verl's fields of a row that are read, beside the dataset columns that parts require."""


@dataclass
class Step:
    """What a batch belongs to.

    version   weight updates the trainer has made; a row sampled by version v has staleness version - v
    """

    number: int
    total: int
    seed: int
    version: int


def real_rows(tags: Sequence[Mapping[str, Any]]) -> Tensor:
    """[B] int64: places of the rows that are no padding of verl's."""
    return torch.tensor([i for i, tag in enumerate(tags) if not tag.get("is_padding", False)], dtype=torch.int64)


def prompt_key(row: Mapping[str, Any]) -> str:
    """Name of a prompt: its column `prompt_key`, else a hash of data source and messages."""
    if row.get(PROMPT_KEY) is not None:
        return str(row[PROMPT_KEY])
    messages = [(m["role"], m["content"]) for m in row["raw_prompt"]]
    return f"{hash_bits(row.get('data_source'), messages) & (2**64 - 1):016x}"


def signal_table(
    data: TensorDict,
    keys: Sequence[str],
    tags: Sequence[Mapping[str, Any]],
    step: Step,
    *,
    eos: Sequence[int],
    temperature: float,
    success_threshold: float,
    component_names: Sequence[str] | None,
    wanted: frozenset[str],
    supplied: Sequence[str] = (),
    token_signals: frozenset[str] = frozenset(),
    top_tokens: bool = False,
) -> tuple[RolloutBatch, Tensor]:
    """The table of verl's real rows, by prompt and session, and the place [B] of each among `keys`.

    data    verl's fields of all rows, padding included
    keys    "<uid>_<session>_<index>" of each row; tags say padding and the versions that sampled it
    wanted  signals the parts require: dataset columns and supplied fields among them become columns
    supplied       fields named in `rlx.rollout_signals`: of `extra_fields`, or of the reward function's dictionary
    token_signals  signals with one entry per response token
    top_tokens     the engine's likeliest tokens are in the rows' extra fields and become columns
    """
    place = real_rows(tags)
    sessions = [_session(keys[i]) for i in place.tolist()]
    names = _prompt_keys(data, place)
    order = sorted(range(len(place)), key=lambda i: (names[i], *sessions[i]))
    place = place[order]
    names, sessions = [names[i] for i in order], [sessions[i] for i in order]
    uids = list(dict.fromkeys(uid for uid, _ in sessions))
    group = torch.tensor([uids.index(uid) for uid, _ in sessions])
    repeat = _occurrences(names, sessions)
    extra = [dict(as_list(data["extra_fields"])[i]) for i in place.tolist()]
    columns: dict[str, Any] = {name: column[place] for name, column in token_columns(data, eos).items()}
    width = max(1, int(lengths(data["responses"])[place].max()))
    columns = {n: c[:, :width] if c.ndim > 1 else c for n, c in columns.items()}
    rewards = padded(data["rm_scores"]).sum(1)[place]
    components, known = _components(extra, rewards, component_names, supplied)
    mask = columns["response_mask"]
    columns |= {
        "staleness": _staleness(mask.shape, [tags[i] for i in place.tolist()], extra, step.version),
        "group": group,
        "row_id": torch.tensor(
            [hash_bits(f"{n}#{step.number}.{r}", s) for n, r, (_, s) in zip(names, repeat, sessions)]
        ),
        "rewards": rewards,
        "reward_components": components,
        "component_names": known,
        "correct": rewards > success_threshold,
        "keep": torch.ones(len(place), dtype=torch.bool),
        "helped": torch.zeros(len(place), dtype=torch.bool),
        "temperature": torch.full((len(place),), temperature),
        "propensity": torch.ones(len(place)),
        "prompt_key": names,
        "source": ["fresh"] * len(place),
        "uid": [uid for uid, _ in sessions],
    }
    columns["logp_behavior"] = logp_behavior(columns)
    fields = {name: _supplied(extra, names, name) for name in sorted(wanted & set(supplied))}
    tokens = lengths(data["responses"])[place].tolist()
    add_supplied(columns, fields, tokens, token_signals)
    if top_tokens:
        columns |= columns_of_rows(extra, columns["response_ids"], tokens, functools.partial(row_name, names))
    columns |= dataset_columns(data, place, wanted - set(columns))
    return RolloutBatch(columns, step=step.number, total_steps=step.total, seed=step.seed), place


def dataset_columns(data: TensorDict, place: Tensor, names: frozenset[str]) -> dict[str, Any]:
    """Columns of the dataset, or entries of its `extra_info`, for the rows at `place`."""
    out: dict[str, Any] = {}
    info = as_list(data["extra_info"]) if "extra_info" in data.keys() else None
    for name in sorted(names):
        if name in data.keys():
            column = data.get(name)
            listed = column.tolist() if isinstance(column, Tensor) and not column.is_nested else as_list(column)
            out[name] = row_column([listed[i] for i in place.tolist()])
        elif info is not None and any(name in (row or {}) for row in info):
            out[name] = row_column([(info[i] or {}).get(name) for i in place.tolist()])
    return out


def _supplied(extra: Sequence[Mapping[str, Any]], keys: Sequence[str], name: str) -> list[Any]:
    """A user's field of every row: an agent loop's extra field, else an entry of the reward function's dictionary."""
    out = []
    for i, row in enumerate(extra):
        told = {**(row.get("reward_extra_info") or {}), **row}
        if name not in told:
            raise DataError(missing_field(name, row_name(keys, i), told))
        out.append(told[name])
    return out


def missing_field(name: str, where: str, there: Iterable[str]) -> str:
    """What to say where a row lacks a field that `rlx.rollout_signals` names."""
    has = ", ".join(sorted(n for n in there if n != "reward_extra_info")) or "none"
    return (
        f"rlx.{OPTION} names {name!r}, but {where} has no such field (it has {has}): return it in the agent loop's"
        " extra_fields or in the reward function's dictionary, None where it is unknown"
    )


def _prompt_keys(data: TensorDict, place: Tensor) -> list[str]:
    fields = {n: as_list(data[n]) for n in (PROMPT_KEY, "raw_prompt", "data_source") if n in data.keys()}
    return [prompt_key({name: values[i] for name, values in fields.items()}) for i in place.tolist()]


def _session(key: str) -> tuple[str, int]:
    uid, session, index = key.rsplit("_", 2)
    if index != "0":
        raise DataError(
            f"row {key}: the agent loop returned several outputs for one rollout, and the plug-ins credit one row per"
            " rollout; return one AgentLoopOutput per run"
        )
    return uid, int(session)


def _occurrences(names: Sequence[str], sessions: Sequence[tuple[str, int]]) -> list[int]:
    """For each row, how many other groups of its prompt come before its own in the batch."""
    seen: dict[str, list[str]] = {}
    out = []
    for name, (uid, _) in zip(names, sessions):
        groups = seen.setdefault(name, [])
        if uid not in groups:
            groups.append(uid)
        out.append(groups.index(uid))
    return out


def _components(
    extra: Sequence[Mapping[str, Any]], rewards: Tensor, names: Sequence[str] | None, supplied: Sequence[str]
) -> tuple[Tensor, tuple[str, ...]]:
    """[B,K] reward components and their names; the scalar reward alone where a reward function returns no others."""
    info = [row.get("reward_extra_info") or {} for row in extra]
    if names is None:
        numeric = {k for row in info for k, v in row.items() if isinstance(v, (bool, int, float)) or v is None}
        names = sorted(numeric - {SCORE, *supplied})
        if not names:
            return rewards[:, None], (SCORE,)
    known = {k for row in info for k in row}
    for name in names:
        if name not in known:
            raise DataError(
                f"rlx.reward_components names {name!r}, but the reward function returned"
                f" {', '.join(sorted(known)) or 'a plain number'}"
            )
    return reward_components(info, names).to(rewards.dtype), tuple(names)


def _staleness(
    shape: torch.Size, tags: Sequence[Mapping[str, Any]], extra: Sequence[Mapping[str, Any]], version: int
) -> Tensor:
    """[B,T] int64: policy versions between sampling and this update; by token where the engine's client told."""
    out = torch.zeros(shape, dtype=torch.int64)
    for b, (tag, row) in enumerate(zip(tags, extra)):
        out[b] = version - _known(tag.get("min_global_steps"), version)
        at = 0
        for n, sampled_by in row.get(VERSIONS) or ():
            out[b, at : at + n] = version - _known(sampled_by, version)
            at += n
    return out


def _known(value: Any, default: int) -> int:
    return default if value is None else int(value)
