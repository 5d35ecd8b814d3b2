"""How a plug-in runs on the table host: what each built-in needs beside its defaults, what users' code would return."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ...core.batch import RolloutBatch
from ...core.config import Parts, specs
from ...core.errors import ConfigError
from ...core.host import TOKEN_SIGNALS
from ...core.kinds import KINDS
from ...core.registry import builtin_names, create
from ...hosts.signals import token_column
from ...hosts.table import BAD, CALL, GOOD, TableHost, TableTrainer
from ...hosts.table.facts import FACTS
from .draws import global_draws

NO_NETWORK = {"drafter", "quant"}
"""Kinds that change an engine or a network, which the table host lacks."""

FIELDS = {
    "critical_turn": lambda r: float(r.slot % 3 - 1),
    "confidence": lambda r: [1 / (2 + token) for token in r.tokens],
    "info_gain": lambda r: [0.1 * r.slot - 0.05 * t for t in range(r.tokens.count(CALL))],
    "support_edges": lambda r: [[0, 1]] if CALL in r.tokens else [],
    "failed_edges": lambda r: [[0, 1]] if r.slot % 2 else None,
    "error": lambda r: [r.slot % 2, 0],
    "direct_user": lambda r: [1, 0],
    "budget": lambda r: 3 + 3 * (r.slot % 2),
    "external": lambda r: r.slot % 4 == 3,
    "predicted": lambda r: float(r.tokens.count(GOOD)),
    "target": lambda r: 3.0,
    "twin_rewards": lambda r: float("nan") if len(r) < 3 else float(r.slot % 2),
}
"""What rollout code would return beside the tokens, for the parts that read it."""

BUDGETS = {"budgets": [3, 6], "prefixes": [[GOOD], [BAD]]}
"""Two token budgets, each told by one token."""

FORKING = {"total_rollouts": 6, "first_wave": 3, "measured_tokens": 1, "boundary_tokens": [BAD]}
"""Few rollouts, forked after wrong steps."""

SETTINGS: dict[tuple[str, str], dict[str, Any]] = {
    ("advantage", "resum"): {"advantage": {"name": "resum", "phrase": [CALL]}},
    ("advantage", "rtmc"): {"advantage": {"name": "rtmc", "signatures": "turns"}},
    ("advantage", "v05"): {"advantage": {"name": "v05", "prior": "prior", "reward_min": 0}},
    ("aggregate", "datpo"): {"advantage": "datpo"},
    ("clip", "a2tgpo"): {"advantage": "a2tgpo"},
    ("method", "a2tgpo"): {"method": {"name": "a2tgpo", "column": "solution"}},
    ("advantage", "adhint"): {"hint": "guide"},
    ("advantage", "hbpo"): {"reward": {"name": "hbpo", "max_length": 16}},
    ("advantage", "sd_grpo"): {
        "advantage": {"name": "sd_grpo", "segment_weights": [{"brief": 1}, {"correct": 1}], "boundary_tokens": [CALL]}
    },
    ("clip", "hapo"): {"advantage": "hapo"},
    ("advantage", "lead"): {"reward": "lead"},
    ("reward", "lead"): {"advantage": "lead"},
    ("reward", "smith"): {"advantage": "gdpo"},
    ("clip", "dro"): {"clip": {"name": "dro", "penalty_coef": 1.0}},
    ("allocator", "arpo"): {"allocator": {"name": "arpo", **FORKING}},
    ("method", "arpo"): {"method": {"name": "arpo", **FORKING}},
    ("allocator", "datpo"): {"allocator": {"name": "datpo", "first_wave": 2, "sentence_ends": [BAD]}},
    ("allocator", "eepo"): {"allocator": {"name": "eepo", "threshold": 9.0}},
    ("method", "eepo"): {"method": {"name": "eepo", "threshold": 9.0}},
    ("allocator", "ehpo"): {"allocator": {"name": "ehpo", "easy": [GOOD], "hard": [BAD]}},
    ("method", "ehpo"): {"method": {"name": "ehpo", "easy": [GOOD], "hard": [BAD]}},
    ("allocator", "far"): {"allocator": {"name": "far", "finish_share": 0.8}},
    ("allocator", "hbpo"): {"allocator": {"name": "hbpo", **BUDGETS}},
    ("allocator", "orchard_bar"): {"allocator": {"name": "orchard_bar", "size": 4, "max_per_prompt": 8, "stride": 4}},
    ("allocator", "resum"): {"allocator": {"name": "resum", "phrase": [CALL]}},
    ("allocator", "trace_tree"): {"allocator": {"name": "trace_tree", "boundary_tokens": [BAD], "learning_rate": 0.1}},
    ("allocator", "v05"): {"allocator": {"name": "v05", "prior": "prior", "reward_min": 0}},
    ("hint", "xrpo"): {"hint": {"name": "xrpo", "column": "solution"}},
    ("replay", "cadence"): {"replay": {"name": "cadence", "phase": 0.5, "min_samples": 2}},
    ("method", "cadence"): {"method": {"name": "cadence", "phase": 0.5, "min_samples": 2}},
    ("method", "resum"): {"method": {"name": "resum", "phrase": [CALL]}},
    ("method", "v05"): {"method": {"name": "v05", "prior": "prior", "reward_min": 0}},
    ("method", "xrpo"): {"method": {"name": "xrpo", "column": "solution"}},
}
"""What a built-in can't run without: parameters of its own, other plug-ins."""

EXEMPT: dict[tuple[str, str], dict[str, str]] = {
    ("aggregate", "seq_mean_token_sum_norm"): {
        "padding": "without a horizon the width of the batch divides, as in verl; with one it passes"
    },
}
"""Checks a built-in with its default parameters need not pass, and why."""

Column = Callable[[RolloutBatch], Any]


def table_trainer(
    config: Mapping[str, Any], columns: Mapping[str, Column] | None = None, **options: Any
) -> TableTrainer:
    """A small multi-turn run on the table host with all of `FIELDS`; `options` are those of `TableTrainer`.

    columns  further signals: column -> function of the batch that makes it
    """
    given = {"groups": 3, "group_size": 4, "max_tokens": 8, "total_steps": 4, "micro_batches": 2, "epochs": 2}
    return TableTrainer(config, host=_Host(columns or {}), **given | options)


class _Host(TableHost):
    """The table host with further columns; what rollout code returns per token is a tensor, as in the other hosts."""

    def __init__(self, columns: Mapping[str, Column]):
        super().__init__(24, turns=2, fields=FIELDS | FACTS)
        for name, column in columns.items():
            if not callable(column):
                raise ConfigError(
                    f"columns: {name!r} must be a function of the batch that returns the column, got {column!r}"
                )
        self.made = columns
        self.profile = replace(
            self.profile,
            signals=self.profile.signals | set(columns),
            default_remedy="the suite can't make it up; pass columns={name: function of the batch}, or"
            " beside={kind: plug-in} if another plug-in makes it",
        )

    def signals(self, batch: RolloutBatch, wanted: frozenset[str]) -> RolloutBatch:
        batch = super().signals(batch, wanted)
        per_token = [name for name in TOKEN_SIGNALS if batch.has(name) and isinstance(batch[name], list)]
        lengths, width = [len(r) for r in batch.rollout], batch.response_mask.shape[1]
        made = {n: token_column(n, batch[n], lengths, width, lambda row: f"row {row}") for n in per_token}
        batch = batch.with_columns(
            **{n: x.to(batch.dtype) if x.dtype.is_floating_point else x for n, x in made.items()}
        )
        with global_draws(0):
            return batch.with_columns(**{name: column(batch) for name, column in self.made.items()})


@dataclass(frozen=True)
class Setting:
    """A plug-in with its parameters, the plug-ins it runs beside, and the columns the host is to supply for it."""

    kind: str
    name: str
    parameters: Mapping[str, Any] = field(default_factory=dict)
    beside: Mapping[str, Any] = field(default_factory=dict)
    columns: Mapping[str, Column] = field(default_factory=dict)

    @classmethod
    def of(cls, kind: str, name: str, parameters: Mapping[str, Any] | None = None, **given: Any) -> Setting:
        """The setting with what `SETTINGS` knows of a built-in; what is given wins."""
        known = dict(SETTINGS.get((kind, name), {}))
        [own] = specs(kind, known.pop(kind, name))
        own.pop("name")
        beside = {**known, **given.pop("beside", {})}
        return cls(kind, name, {**own, **(parameters or {})}, beside, **given)

    @property
    def label(self) -> str:
        return f"{self.kind} {self.name}"

    def part(self) -> Any:
        """The plug-in with fresh state."""
        return create(self.kind, self.name, **self.parameters)

    def config(self) -> dict[str, Any]:
        """The configuration of a run; the plug-in is the last of its chain."""
        own = {"name": self.name, **self.parameters}
        before = specs(self.kind, self.beside[self.kind]) if self.kind in self.beside else []
        return {**self.beside, self.kind: [*before, own] if before else own}

    def trainer(self, **options: Any) -> TableTrainer:
        """A run with the plug-in on the table host."""
        if self.kind in NO_NETWORK:
            raise ConfigError(f"{self.label}: the table host has no engine and no network")
        return table_trainer(self.config(), self.columns, **options)

    def own(self, parts: Parts) -> Any:
        """The plug-in among the parts of a run."""
        return parts[self.kind][-1]


def settings_of_builtins() -> list[Setting]:
    """A setting for every built-in plug-in, in the order of the kinds."""
    return [Setting.of(kind, name) for kind in KINDS for name in sorted(builtin_names(kind))]
