"""The plug-in under test: the batches its hooks are given in a run on the table host, and one call of a hook.

A call works on a batch alone. For a hook of the loss, the batch also carries what only exists there, as columns whose
names begin with "loss:": the current policy's log-probs and entropy, logits, and a random weight per token that turns
the hook's result into one number to differentiate.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ...core.batch import RolloutBatch
from ...core.config import Parts
from ...core.errors import RegistrationError
from ...core.host import BATCH_SIGNALS
from ...core.kinds import Aggregate, Auxiliary, Plugin
from ...core.objective import policy_loss
from ...core.preparation import Prepared, prepare
from ...core.registry import implements
from ...core.returned import COLUMNS, description
from ...core.terms import PolicyTerms, masked
from ...core.trajectory import Rollout
from ...hosts.table import CALL, TablePolicy, TableTrainer
from ...hosts.table.policy import entropy, score
from .draws import global_draws
from .report import Failed, Skipped
from .setting import NO_NETWORK, Setting

WARM_STEPS = 2
"""Steps of training before a hook is looked at: its state is not the fresh one, rollouts are as old as that."""
SIZES = (5, 3, 1, 4)
"""Rows of the groups of a sample: ragged, one of them alone, 13 together, which no other dimension equals."""
EMPTY_ROW = 1
"""The row of a sample that has no model token."""
MOVED = 0.3
"""Standard deviation of the change of the policy's logits between rollout and start of the step, and until the loss."""
MORE_CALLS = 2.0
"""Added to the logit of a tool call, so that most rows of a sample have tool output in the middle."""

POLICY, ENTROPY, LOGITS, WEIGHT = "loss:logp_new", "loss:entropy", "loss:logits", "loss:weight"
TEACHER_LOGITS = "teacher_logits"
LEAVES = (POLICY, ENTROPY, LOGITS)
MADE_BY_CORE = frozenset({"row", "advantages", "correction_weight", "loss_weight", "loss_count"})
"""Columns the batch phase adds by itself."""

LOSS_KINDS = {"ratio", "clip", "distill", "auxiliary"}
BATCH_KINDS = {"reward", "advantage", "correction", "aggregate", "selector"}


@dataclass(frozen=True)
class Hook:
    """A call of the update side that the checks make: its name and whether it happens in the loss."""

    name: str
    in_loss: bool


@dataclass
class Outcome:
    """What a call returned, by column name, the gradients [B,T,...] of its weighted sum, and that sum."""

    values: dict[str, Any]
    gradients: dict[str, Tensor] = field(default_factory=dict)
    total: Tensor | None = None


Reward = tuple[float | None, dict[str, float]]


def usual(r: Rollout) -> Reward:
    """Every third rollout of a group succeeds, whatever its tokens; the other components are the table's."""
    success = float((r.slot + _number(r)) % 3 == 0)
    return success, {**score(r.tokens, r.stop == "eos")[1], "correct": success}


def all_equal(r: Rollout) -> Reward:
    """The same reward and components for every rollout."""
    return 1.0, {"correct": 1.0, "brief": 0.5, "ended": 1.0}


def some_unscorable(r: Rollout) -> Reward:
    """No reward for the first rollout of the step's first group, and for none of its second group."""
    return (None, {}) if _number(r) == 1 or (_number(r) == 0 and r.slot == 0) else usual(r)


def _number(r: Rollout) -> int:
    """As the how-manieth of its step the rollout's group was started; 0 for groups that a plug-in made."""
    found = re.search(r"#\d+\.(\d+)$", r.group)
    return int(found[1]) if found else 0


class Subject:
    """A plug-in in a setting, with the runs and samples that several checks share."""

    def __init__(self, setting: Setting):
        self.setting = setting
        self.kind, self.label = setting.kind, setting.label
        self._samples: dict[tuple[Any, ...], RolloutBatch] = {}

    # ---- the plug-in
    def build(self) -> None:
        """ConfigError where the plug-in can't be made, or not run beside what the setting names."""
        if self.kind in NO_NETWORK:
            self.setting.part()
        else:
            self._new_trainer()

    def part(self) -> Any:
        """A new instance with the state of the run after `WARM_STEPS` steps."""
        return copy.deepcopy(self._warm)

    @functools.cached_property
    def _warm(self) -> Any:
        part = self.setting.part()
        part.load_state_dict(self.setting.own(self.run.parts).state_dict())
        return part

    @functools.cached_property
    def run(self) -> TableTrainer:
        """A run of `WARM_STEPS` steps."""
        trainer = self._new_trainer()
        with global_draws(0):
            trainer.run(WARM_STEPS)
        return trainer

    @functools.cached_property
    def _parts(self) -> Parts:
        """The plug-ins of a run of which only those of the loss are called."""
        return self._new_trainer().parts

    def _new_trainer(self) -> TableTrainer:
        return self.setting.trainer(groups=len(SIZES), group_size=max(SIZES), sync_every=WARM_STEPS + 1)

    @functools.cached_property
    def hooks(self) -> list[Hook]:
        """The calls of the update side that this plug-in has."""
        part = self.setting.part()
        hooks = [Hook("__call__", self.kind in LOSS_KINDS)] if self.kind in LOSS_KINDS | BATCH_KINDS else []
        if self.kind == "auxiliary":
            hooks += [Hook(name, False) for name in ("mask", "aggregate") if implements(part, name)]
        if self.kind == "advantage" and implements(part, "in_loss"):
            hooks.append(Hook("in_loss", True))
        return hooks

    def hooks_or_skip(self, *, in_loss: bool | None = None) -> list[Hook]:
        """The hooks, or those of one phase; `Skipped` where there is none."""
        hooks = [h for h in self.hooks if in_loss is None or h.in_loss == in_loss]
        if not hooks:
            where = {None: "on the update side", True: "in the loss", False: "in the batch phase"}[in_loss]
            raise Skipped(f"no hook {where}")
        return hooks

    # ---- samples
    def sample(
        self, hook: Hook, reward: Callable[[Rollout], Reward] = usual, alone: bool = False, fresh: bool = False
    ) -> RolloutBatch:
        """The batch the hook is called on in the next step of the run.

        reward  of the step's rollouts
        alone   every group is one rollout; else groups have `SIZES` rows
        fresh   in the first step of another run, which the plug-in has taken no part in yet
        """
        key = (hook, reward, alone, fresh)
        if key not in self._samples:
            self._samples[key] = self._new_sample(*key)
        return self._samples[key]

    def _new_sample(self, hook: Hook, reward: Callable[[Rollout], Reward], alone: bool, fresh: bool) -> RolloutBatch:
        trainer = self._new_trainer()
        if not fresh:
            trainer.load_state_dict(self.run.state_dict())
        host = trainer.host
        host.engine.score = reward
        with torch.no_grad():
            host.policy.theta[:, :, CALL] += MORE_CALLS
        host.engine.load(host.policy.theta, host.engine.version)
        _move(host.policy, seed=1)
        if alone:
            trainer.groups, trainer.group_size = sum(SIZES), 1
        batch = trainer.rollouts(trainer.context())
        if not alone:
            place = batch.groups.rank(torch.arange(batch.size, dtype=torch.float64))
            batch = _one_empty(batch.rows(place < torch.tensor([SIZES[g % len(SIZES)] for g in batch.group.tolist()])))
        if hook.in_loss:
            return self._loss_sample(trainer, prepare(trainer.parts, batch).batch)
        part = self.setting.own(trainer.parts)
        _replace(part, hook.name, _stop)
        try:
            prepare(trainer.parts, batch)
        except _Reached as reached:
            return reached.batch
        raise AssertionError(f"{self.label}.{hook.name} was not called by the batch phase")

    def _loss_sample(self, trainer: TableTrainer, batch: RolloutBatch) -> RolloutBatch:
        """The batch with the columns of the loss under a policy that has moved since the step began."""
        _move(trainer.host.policy, seed=2)
        logits = trainer.host.logits(batch).detach()
        columns = {POLICY: trainer.host.logp(batch, logits), ENTROPY: entropy(logits)}
        if trainer.parts.with_hook("from_logits"):
            columns |= {LOGITS: logits, TEACHER_LOGITS: trainer.host.teacher_logits(batch).detach()}
        shape = batch.response_mask.shape
        weight = 0.5 + torch.rand(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        return batch.with_columns(**{name: column.detach() for name, column in columns.items()}, **{WEIGHT: weight})

    # ---- a call
    def call(
        self,
        hook: Hook,
        batch: RolloutBatch,
        part: Any = None,
        *,
        declared_only: bool = False,
        in_place: bool = False,
        seed: int = 0,
    ) -> Outcome:
        """One call of the hook on the batch.

        part           the instance; one with the run's state unless given
        declared_only  give the hook only the columns its plug-in says it reads
        in_place       give it the batch's own tensors, not copies
        seed           of the global generators
        """
        part = self.part() if part is None else part
        if not in_place:
            copies = {name: column.clone() for name, column in batch.items() if isinstance(column, Tensor)}
            batch = batch.with_columns(**copies)
        with global_draws(seed):
            if hook.in_loss:
                return self._call_in_loss(part, hook, batch, declared_only)
            given = self.declared(part, batch) if declared_only else batch
            with torch.no_grad():
                return Outcome(_call_in_batch_phase(part, hook.name, given))

    def _call_in_loss(self, part: Any, hook: Hook, batch: RolloutBatch, declared_only: bool) -> Outcome:
        """The loss of the batch as one micro-batch, with the part in the run's place for it."""
        seen: list[Any] = []
        plain = getattr(type(part), hook.name)

        def watched(own: Any, terms: PolicyTerms, *rest: Any) -> Any:
            if declared_only:
                terms = dataclasses.replace(terms, batch=self.declared(part, terms.batch))
            seen.append(plain(own, terms, *rest))
            return seen[-1]

        _replace(part, hook.name, watched)
        leaves = {name: batch[name].detach().clone().requires_grad_() for name in LEAVES if batch.has(name)}
        others = self._parts
        parts = dataclasses.replace(others, by_kind={**others.by_kind, self.kind: [*others[self.kind][:-1], part]})
        with contextlib.suppress(RegistrationError):  # a result that does not fit is the check `shapes`
            policy_loss(
                parts,
                batch,
                leaves[POLICY],
                totals={name: count.sum() for name, count in Prepared(batch).counts().items()},
                entropy=leaves[ENTROPY] if "entropy" in parts.requires else None,
                logits=leaves.get(LOGITS),
            )
        result, metrics = seen[0] if isinstance(seen[0], tuple) else (seen[0], {})
        values = {"result": result, **{f"metric {name}": value for name, value in metrics.items()}}
        if not isinstance(result, Tensor) or result.shape != batch.response_mask.shape:
            return Outcome(values)
        total = (masked(result, self.tokens(part, batch)) * batch[WEIGHT].to(result.dtype)).sum()
        return Outcome(values, _gradients(total, leaves), total)

    def tokens(self, part: Any, batch: RolloutBatch) -> Tensor:
        """[B,T] bool: the tokens whose results count."""
        return part.mask(batch) if isinstance(part, Auxiliary) else batch.response_mask

    def legible(self, part: Any, batch: RolloutBatch) -> Tensor:
        """[B,T] bool: the tokens a plug-in may look at: the model's, those of hints, and its own."""
        own = batch.response_mask | self.tokens(part, batch)
        return own | batch.hint_mask.bool() if batch.has("hint_mask") else own

    def declared(self, part: Any, batch: RolloutBatch) -> RolloutBatch:
        """The batch with the columns every host gives, those the core makes, and those the plug-in names."""
        own = {f"{part.name}_weight", f"{part.name}_count"}
        allowed = BATCH_SIGNALS | MADE_BY_CORE | frozenset(part.requires) | frozenset(part.provides) | own
        columns = {name: column for name, column in batch.items() if name in allowed or name.startswith("uniform:")}
        return RolloutBatch(columns, step=batch.step, total_steps=batch.total_steps, seed=batch.seed)


def _one_empty(batch: RolloutBatch) -> RolloutBatch:
    """The batch with a row none of whose tokens counts."""
    mask, turns, segments = batch.response_mask.clone(), batch.turn_ids.clone(), batch.segment_ids.clone()
    mask[EMPTY_ROW], turns[EMPTY_ROW], segments[EMPTY_ROW] = False, -1, -1
    return batch.with_columns(response_mask=mask, turn_ids=turns, segment_ids=segments)


def _move(policy: TablePolicy, seed: int) -> None:
    """Another policy: every logit changes by `MOVED` or so."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        policy.theta.add_(torch.randn(policy.theta.shape, generator=generator, dtype=torch.float64), alpha=MOVED)


class _Reached(Exception):
    def __init__(self, batch: RolloutBatch):
        self.batch = batch


def _stop(own: Any, batch: RolloutBatch, *rest: Any) -> Any:
    raise _Reached(batch)


def _replace(part: Plugin, hook: str, function: Callable[..., Any]) -> None:
    """Let `function` answer the hook of this one instance (Python looks `__call__` up on the class)."""
    part.__class__ = type(type(part).__name__, (type(part),), {hook: function})


def _call_in_batch_phase(part: Any, hook: str, batch: RolloutBatch) -> dict[str, Any]:
    if hook == "mask":
        return {"mask": part.mask(batch)}
    if hook == "aggregate":
        return dict(part.aggregate(batch, part.mask(batch)))
    returned = part(batch, batch.response_mask) if isinstance(part, Aggregate) else part(batch)
    if not isinstance(returned, Mapping):
        names = ", ".join(f'"{name}": ...' for name in COLUMNS[part.kind])
        raise Failed("a mapping of columns", f"{hook} returns {description(returned)}", f"return {{{names}}}")
    return dict(returned)


def _gradients(total: Tensor, leaves: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The gradient of `total` with respect to every leaf; zeros where it does not depend on one."""
    if not total.requires_grad:
        return {name: torch.zeros_like(leaf) for name, leaf in leaves.items()}
    found = torch.autograd.grad(total, list(leaves.values()), allow_unused=True, retain_graph=True)
    return {name: torch.zeros_like(leaf) if g is None else g for (name, leaf), g in zip(leaves.items(), found)}
