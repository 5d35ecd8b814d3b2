"""DivOPD: a few turns of every rollout, those in which student and teacher disagree most."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..core.batch import RolloutBatch
from ..core.kinds import Columns, Selector
from ..core.params import param
from ..core.registry import register
from ..core.segments import Segments
from ..core.terms import masked
from ._steps import Steps


@register("selector", "divopd")
@dataclass
class DivOPD(Selector):
    """Instead of all turns of a multi-turn batch, the update takes a bounded number: every rollout gives a few, within
    a rollout those of the largest summed disagreement between the policy that wrote them and the teacher.

        s(turn) = sum over its valid tokens of (logp_rollout - logp_teacher), signed
        first sweep: every rollout in order gives its `cap` highest turns, until there are `turns` of them;
        while some are missing the cap rises by one and the sweep is repeated

    Reads logp_rollout, logp_teacher (valid: both known), turn_ids and staleness [B,T]; returns weight [B,T], 1 on the
    chosen turns' tokens, and the numbers chosen_turns, dead_turns and distinct_rollouts. Turns older than
    `max_staleness` versions, or without a valid token, are left out. `focus=False` takes a rollout's turns in their
    order. Loss and denominator are untouched.

    A batch's rows are gone after its step, so that turns which were not chosen do not wait for the next one here: the
    learner that keeps a queue of single turns over many updates is `TurnQueue` below, with the same choice.
    """

    paper = "DivOPD: Spread wide, look close for asynchronous on-policy distillation of multi-turn agents"
    requires = frozenset({"logp_rollout", "logp_teacher", "turn_ids", "staleness"})
    scope = "batch"

    turns: int = param(64, ge=1, doc="turns of an update, B; the paper's 64")
    cap: int = param(4, ge=1, doc="turns a rollout gives in the first sweep, k; the paper's 4")
    max_staleness: int = param(2, ge=0, doc="policy versions a turn may be old, delta; the paper's 2")
    focus: bool = param(True, doc="rank a rollout's turns by disagreement; False: the paper's base, in order")

    def __call__(self, batch: RolloutBatch) -> Columns:
        mask = batch.response_mask
        gap = batch.logp_rollout - batch.logp_teacher
        valid = mask & torch.isfinite(gap)
        steps = Steps.of(batch.turn_ids, valid)
        stale = batch.staleness if batch.staleness.ndim == 2 else batch.staleness[:, None].expand_as(mask)
        old = steps.sum((valid & (stale > self.max_staleness)).to(batch.dtype)) > 0
        score = steps.sum(masked(gap, valid))
        young = (~old).nonzero()[:, 0]
        taken = young[select_turns(steps.row[young], score[young], self.turns, self.cap, self.focus)]
        chosen = torch.zeros_like(old)
        chosen[taken] = True
        return {
            "weight": steps.spread(chosen).to(batch.dtype),
            "chosen_turns": len(taken),
            "dead_turns": len(Steps.of(batch.turn_ids, mask)) - len(steps),
            "distinct_rollouts": len(torch.unique(steps.row[taken])),
        }


def select_turns(rollout: Tensor, score: Tensor, turns: int, cap: int, focus: bool) -> Tensor:
    """Indices of the chosen turns, in the order in which the sweeps take them.

    rollout [S] int64: place of the turn's rollout in the order of the sweeps; score [S], NaN ranks last; ties, and all
    turns without `focus`, in the order of the entries.
    """
    if not len(rollout):
        return rollout
    lowest = torch.finfo(score.dtype).min
    key = -score.nan_to_num(nan=lowest, posinf=-lowest, neginf=lowest) if focus else torch.zeros_like(score)
    place = Segments(rollout).rank(key)
    sweep = (place - cap + 1).clamp(min=0)
    size = len(rollout)
    dense = torch.unique(rollout, return_inverse=True)[1]
    return torch.argsort((sweep * size + dense) * size + place)[:turns]


@dataclass
class Turn:
    """One turn in the queue. score: summed disagreement with the teacher; alive: worth reading (complete, scored)."""

    rid: int
    t: int
    version: int
    score: float
    alive: bool
    first_seen: int = -1


@dataclass
class Update:
    """What one update took: the turns, those that wait, and how many were dead or too old when they were read."""

    selected: list[Turn]
    pending: list[Turn]
    dead: int
    stale_fresh: int

    @property
    def distinct_rollouts(self) -> int:
        return len({u.rid for u in self.selected})


class TurnQueue:
    """The learner's side of asynchronous on-policy distillation: turns arrive one by one and wait to be chosen.

    batch_size, cap, focus   as `turns`, `cap`, `focus` of the selector
    pool_mult          batches of turns that are compared at a time, c
    max_staleness      policy versions a turn may be old when it is chosen, delta
    max_pending_age    updates a turn may wait after it was first read, W

    Waiting rollouts come before new ones. The state is plain values.
    """

    def __init__(
        self,
        batch_size: int = 64,
        pool_mult: float = 4,
        cap: float = 4,
        max_staleness: int = 2,
        max_pending_age: int = 8,
        focus: bool = True,
    ):
        self.batch_size, self.pool_mult, self.cap = batch_size, pool_mult, cap
        self.max_staleness, self.max_pending_age, self.focus = max_staleness, max_pending_age, focus
        self.pending: list[Turn] = []
        self.buffer: list[Turn] = []
        self.at = 0

    def add(self, turns: Sequence[Turn]) -> None:
        """Turns that arrived, in order."""
        self.buffer += turns

    def update(self) -> Update:
        """The turns of the next update; fewer than `batch_size` where there are not more."""
        oldest = max(self.at - self.max_staleness, 0)
        pool = [u for u in self.pending if u.version >= oldest]
        dead = stale = read = 0
        room = math.floor(self.pool_mult * self.batch_size) - len(pool)
        while room > 0 and read < len(self.buffer):
            turn = self.buffer[read]
            read += 1
            if turn.version < oldest:
                stale += 1
                continue
            room -= 1
            if turn.alive:
                pool.append(dataclasses.replace(turn, first_seen=self.at))
            else:
                dead += 1
        self.buffer = self.buffer[read:]
        selected = self._select(pool)
        taken = {id(u) for u in selected}
        left = [u for u in pool if id(u) not in taken]
        self.pending = [u for u in left if self.at - u.first_seen <= self.max_pending_age]
        self.at += 1
        return Update(selected, list(self.pending), dead, stale)

    def _select(self, pool: list[Turn]) -> list[Turn]:
        if self.focus:
            pool = sorted(pool, key=lambda u: (u.rid, u.t))
        waiting: dict[int, int] = {}
        for u in pool:
            waiting[u.rid] = min(waiting.get(u.rid, u.first_seen), u.first_seen)
        place = {rid: n for n, rid in enumerate(sorted(waiting, key=lambda rid: (waiting[rid], rid)))}
        rollout = torch.tensor([place[u.rid] for u in pool], dtype=torch.int64)
        score = torch.tensor([u.score for u in pool], dtype=torch.float64)
        cap = int(min(self.cap, max(len(pool), 1)))
        return [pool[i] for i in select_turns(rollout, score, self.batch_size, cap, self.focus).tolist()]

    def state_dict(self) -> dict[str, Any]:
        return {
            "at": self.at,
            "pending": [dataclasses.asdict(u) for u in self.pending],
            "buffer": [dataclasses.asdict(u) for u in self.buffer],
        }

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        self.at = saved["at"]
        self.pending = [Turn(**u) for u in saved["pending"]]
        self.buffer = [Turn(**u) for u in saved["buffer"]]
