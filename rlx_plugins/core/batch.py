"""The scored batch: a table of named columns, one entry per row, in the vocabulary of docs/architecture.md."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from . import randomness
from .errors import DataError, MissingSignal
from .segments import Segments

if TYPE_CHECKING:
    from .trajectory import Group, Rollout, Top


class RolloutBatch(Mapping[str, Any]):
    """Columns by name, read as attributes (`batch.rewards`) or items (`batch["rewards"]`).

    A column is a tensor whose first dimension is the rows, a list with one entry per row, or a value that belongs to
    the whole batch (component_names). A batch does not change: `with_columns` and `rows` return new ones.

    step, total_steps, seed   of the run, for schedules and `uniform`
    """

    def __init__(self, columns: Mapping[str, Any], *, step: int = 0, total_steps: int = 1, seed: int = 0):
        self._columns = dict(columns)
        self.step, self.total_steps, self.seed = step, total_steps, seed

    # ---- reading
    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return self[name]

    def __getitem__(self, name: str) -> Any:
        try:
            return self._columns[name]
        except KeyError:
            have = ", ".join(sorted(self._columns))
            raise MissingSignal(f"the batch carries no column {name!r}; it has {have}") from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._columns)

    def __len__(self) -> int:
        """Number of columns; `size` is the number of rows."""
        return len(self._columns)

    def __contains__(self, name: object) -> bool:
        return name in self._columns

    def has(self, name: str) -> bool:
        """Whether the column exists."""
        return name in self._columns

    @property
    def size(self) -> int:
        """Number of rows B."""
        return len(self["group"])

    @property
    def dtype(self) -> torch.dtype:
        """Floating-point type of statistics, weights and counts: that of the rewards, float32 at least."""
        rewards = self._columns.get("rewards")
        if isinstance(rewards, Tensor) and rewards.dtype.is_floating_point:
            return torch.promote_types(rewards.dtype, torch.float32)
        return torch.get_default_dtype()

    @property
    def device(self) -> torch.device:
        return self["group"].device

    @property
    def progress(self) -> float:
        """Share of the run that is over, in [0, 1)."""
        return self.step / self.total_steps if self.total_steps > 0 else 0.0

    @functools.cached_property
    def groups(self) -> Segments:
        """The rows by baseline group."""
        return Segments(self["group"])

    @functools.cached_property
    def lengths(self) -> Tensor:
        """[B] int64: model tokens that count (response_mask) per row."""
        return self["response_mask"].sum(1, dtype=torch.int32).long()  # summing bools as int64 is slow on CPU

    def uniform(self, name: str) -> Tensor:
        """[B] float64 in [0, 1), one per row, determined by seed, step, `name` and the row's `row_id`.

        A column `uniform:<name>` replaces the draw in tests. `name` begins with the plug-in's own: "nat_urs/keep".
        """
        if (given := f"uniform:{name}") in self._columns:
            return self._columns[given]
        return randomness.row_uniform(self["row_id"], self.seed, self.step, name)

    def spread(self, per_row: Tensor) -> Tensor:
        """[B] -> [B,T]: the value on every token of response_mask, exactly 0 elsewhere; a NaN row is 0 everywhere."""
        known = torch.where(torch.isnan(per_row), torch.zeros_like(per_row), per_row)
        return known[:, None] * self["response_mask"]  # a product: on a CPU several times faster than a selection

    # ---- new batches
    def with_columns(self, **columns: Any) -> RolloutBatch:
        """A batch with these columns added or replaced."""
        return self._like({**self._columns, **columns})

    def rows(self, index: Tensor) -> RolloutBatch:
        """The rows of an int64 index or a bool mask [B], in that order."""
        if index.dtype == torch.bool:
            index = index.nonzero()[:, 0]
        listed: list[int] | None = None
        out: dict[str, Any] = {}
        for name, column in self._columns.items():
            if not self._per_row(column):
                out[name] = column
            elif isinstance(column, Tensor):
                out[name] = column[index.to(column.device)]
            else:
                listed = index.tolist() if listed is None else listed
                out[name] = [column[i] for i in listed]
        return self._like(out)

    def cut(self, length: int) -> RolloutBatch:
        """Every [B,T,...] column shortened to its first `length` tokens."""
        shape = self["response_mask"].shape

        def shortened(column: Any) -> Any:
            per_token = isinstance(column, Tensor) and column.shape[:2] == shape
            return column[:, :length] if per_token else column

        return self._like({name: shortened(column) for name, column in self._columns.items()})

    def to(self, device: torch.device | str) -> RolloutBatch:
        """Tensor columns moved to `device`."""
        return self._like({k: v.to(device) if isinstance(v, Tensor) else v for k, v in self._columns.items()})

    def token_columns(self) -> dict[str, Tensor]:
        """The [B,T] and [B,T,...] columns: what a `from_logits` hook receives, cut to the tokens at hand."""
        shape = self["response_mask"].shape
        return {k: v for k, v in self._columns.items() if isinstance(v, Tensor) and v.shape[:2] == shape}

    def _per_row(self, column: Any) -> bool:
        if isinstance(column, Tensor):
            return column.ndim > 0 and len(column) == self.size
        return isinstance(column, list) and len(column) == self.size

    def _like(self, columns: Mapping[str, Any]) -> RolloutBatch:
        return RolloutBatch(columns, step=self.step, total_steps=self.total_steps, seed=self.seed)


def pack(
    groups: Sequence[Group],
    *,
    version: int = 0,
    step: int = 0,
    total_steps: int = 1,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> RolloutBatch:
    """The finished rollouts of `groups` as a batch: rows in group order, responses padded on the right.

    Token columns [B,T]: response_ids, response_mask, hint_mask, turn_ids, segment_ids (-1 = none), logp_rollout (NaN
    = unknown), logp_behavior (where recorded), staleness (policy versions); rollout_top_ids and rollout_top_logp
    [B,T,K] (-1 and NaN = no entry) where an engine reported them. Row columns [B]: group, row_id, rewards
    (NaN = unscorable), keep, helped, finished, temperature, propensity; reward_components [B,K] with component_names;
    the scalars parts left in `rollout.extras` (NaN where a row has none). Lists: prompt_key, prompt_ids, source,
    rollout.
    """
    rows = [(g, n, r) for n, g in enumerate(groups) for r in sorted(g.done(), key=lambda r: r.slot)]
    if not rows:
        raise DataError("no rollout finished in this step: there is nothing to train on")
    shape = (len(rows), max(1, max(len(r) for *_, r in rows)))
    ids = torch.zeros(shape, dtype=torch.int64)
    mask, hint = torch.zeros(shape, dtype=torch.bool), torch.zeros(shape, dtype=torch.bool)
    turn, segment = torch.full(shape, -1), torch.full(shape, -1)
    logp, behavior = torch.full(shape, torch.nan, dtype=dtype), torch.full(shape, torch.nan, dtype=dtype)
    stale = torch.zeros(shape, dtype=torch.int64)
    has_behavior = False
    for b, (_, _, r) in enumerate(rows):
        at = 0
        for k, s in enumerate(r.segments):
            where = slice(at, at := at + len(s.tokens))
            ids[b, where] = torch.tensor(s.tokens, dtype=torch.int64)
            mask[b, where] = s.counts
            hint[b, where] = s.source == "hint"
            if s.from_model or s.imitated:
                turn[b, where], segment[b, where] = s.turn, k
                stale[b, where] = version - s.version if s.version >= 0 else 0
            if s.logp is not None:
                logp[b, where] = torch.tensor(s.logp, dtype=dtype)
            if s.logp_behavior is not None:
                behavior[b, where] = torch.tensor(s.logp_behavior, dtype=dtype)
                has_behavior = True
    rollouts = [r for *_, r in rows]
    columns: dict[str, Any] = {
        "response_ids": ids,
        "response_mask": mask,
        "hint_mask": hint,
        "turn_ids": turn,
        "segment_ids": segment,
        "logp_rollout": logp,
        "staleness": stale,
        "group": torch.tensor([n for _, n, _ in rows]),
        "row_id": torch.tensor([randomness.hash_bits(g.id, r.slot) for g, _, r in rows]),
        "rewards": torch.tensor([torch.nan if r.reward is None else r.reward for r in rollouts], dtype=dtype),
        "keep": torch.tensor([r.keep for r in rollouts]),
        "helped": torch.tensor([r.helped for r in rollouts]),
        "finished": torch.tensor([r.stop == "eos" for r in rollouts]),
        "temperature": torch.tensor([r.temperature for r in rollouts], dtype=dtype),
        "propensity": torch.tensor([r.propensity for r in rollouts], dtype=dtype),
        "prompt_key": [r.prompt_key for r in rollouts],
        "prompt_ids": [r.prompt for r in rollouts],
        "source": [r.tag or ("fresh" if g.fresh else "replayed") for g, _, r in rows],
        "rollout": rollouts,
    }
    if has_behavior:
        columns["logp_behavior"] = behavior
    columns |= _top(rollouts, shape, dtype)
    names = sorted({name for r in rollouts for name in r.components})
    if names:
        values = [[r.components.get(name, torch.nan) for name in names] for r in rollouts]
        columns["reward_components"] = torch.tensor(values, dtype=dtype)
        columns["component_names"] = tuple(names)  # not a list: that would be a per-row column when K == B
    columns |= _extras(rollouts, dtype, taken=set(columns))
    batch = RolloutBatch(columns, step=step, total_steps=total_steps, seed=seed)
    return batch.to(device)


def _top(rollouts: Sequence[Rollout], shape: tuple[int, int], dtype: torch.dtype) -> dict[str, Tensor]:
    """The engine's likeliest tokens as columns [B,T,K]; none where no segment has them."""
    places: list[tuple[int, int, Top]] = []
    for b, r in enumerate(rollouts):
        at = 0
        for s in r.segments:
            if s.top is not None:
                places.append((b, at, s.top))
            at += len(s.tokens)
    size = max((top[0].shape[1] for *_, top in places), default=0)
    return top_token_columns(places, (*shape, size), dtype) if size else {}


def top_token_columns(
    places: Iterable[tuple[int, int, Top]], shape: tuple[int, int, int], dtype: torch.dtype = torch.float32
) -> dict[str, Tensor]:
    """`rollout_top_ids` and `rollout_top_logp` [B,T,K] of (row, first token, likeliest tokens from there on).

    -1 and NaN where nothing is known; what reaches beyond T is left out.
    """
    ids, logp = torch.full(shape, -1, dtype=torch.int32), torch.full(shape, torch.nan, dtype=dtype)
    for b, at, (known_ids, known_logp) in places:
        n, k = min(len(known_ids), shape[1] - at), known_ids.shape[1]
        ids[b, at : at + n, :k], logp[b, at : at + n, :k] = known_ids[:n], known_logp[:n]
    return {"rollout_top_ids": ids, "rollout_top_logp": logp}


def _extras(rollouts: Sequence[Any], dtype: torch.dtype, taken: set[str]) -> dict[str, Any]:
    """What parts left in `rollout.extras`: scalars as a [B] tensor, anything else as a list."""
    out: dict[str, Any] = {}
    for name in sorted({k for r in rollouts for k in r.extras} - taken):
        values = [r.extras.get(name) for r in rollouts]
        if all(v is None or isinstance(v, (bool, int, float)) for v in values):
            out[name] = torch.tensor([torch.nan if v is None else float(v) for v in values], dtype=dtype)
        else:
            out[name] = values
    return out
