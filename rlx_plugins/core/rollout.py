"""The rollout program: how one step's groups come about, as a conversation between its parts and the host.

`rollout_program` is a coroutine. It yields operations (`Generate`, `Abort`, `Forward`), the host executes each and
sends the result back, and it returns the groups of the training batch:

    intake -> draw -> [more -> prepare -> Generate -> look]* -> complete -> accept -> (draw again) -> close -> annotate

Sampler, allocator, hint, temperature, replay and pruner are six names for parts of this one program (core/kinds.py).
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any

from .config import Parts
from .context import Context
from .errors import ConfigError
from .operations import Abort, Generate, Operation, Steps, as_steps
from .trajectory import Group, Rollout

LIVE = ("new", "running", "paused")
"""States of a rollout that generation goes on with; "parked" ones wait until a later step brings them back."""


def drive(program: Steps, execute: Callable[[Operation], Any]) -> Any:
    """Run a program to its end, sending back what `execute` returns for each operation; returns its result."""
    try:
        operation = next(program)
        while True:
            operation = program.send(execute(operation))
    except StopIteration as end:
        return end.value


def rollout_program(parts: Parts, ctx: Context) -> Steps:
    """One step of generation; returns the groups to train on, at most `ctx.groups` of them, in the order they came in.

    The first `ctx.groups` to be ready are the batch; their order does not tell when each was ready, which is timing.
    """
    return (yield from _Step(parts, ctx).run())


class _Step:
    """The program's variables: groups under way, complete ones, and those that have left."""

    def __init__(self, parts: Parts, ctx: Context):
        self.parts, self.ctx = parts, ctx
        self.all = parts.rollout
        self.sampler = parts.one("sampler")
        self.planners = [p for kind in ("allocator", "hint") for p in parts[kind]]
        self.waits_for_all = any(p.scope == "batch" for p in self.planners)
        self.offered = iter(ctx.offered)
        self.under_way: dict[str, Group] = {}
        self.arrival: dict[str, int] = {}
        self.ready: list[Group] = []
        self.departed: list[Group] = []

    def run(self) -> Steps:
        need = self.ctx.groups
        refills = any(p.refills for kind in ("sampler", "allocator") for p in self.parts[kind])
        brought, to_start = self._take_in(need, ("replay", "pruner", "allocator"))
        while True:
            started = yield from self._start(to_start)
            ended = yield from self._generate(need)
            missing = need - len(self.ready)
            if ended or not refills or missing <= 0 or brought + started == 0:
                break
            brought, to_start = self._take_in(missing, ("allocator",))
        return (yield from self._end(need))

    def _take_in(self, need: int, kinds: Sequence[str]) -> tuple[int, int]:
        """Take the groups that parts of `kinds` bring along; returns how many, and how many prompts are to start."""
        count, to_start = 0, need
        for part in (p for kind in kinds for p in self.parts[kind]):
            brought, to_start = part.intake(to_start, self.ctx)
            count += len(brought)
            for g in brought:
                self._take(g)
                for r in g.rollouts:
                    if r.state == "parked":
                        r.state = "new"
        return count, to_start

    def _take(self, group: Group) -> None:
        self.arrival[group.id] = len(self.arrival)
        self.under_way[group.id] = group

    def _start(self, n: int) -> Steps:
        """Open a group for each prompt the sampler (or the host's data loader) names; returns how many."""
        if n <= 0:
            return 0
        keys: Sequence[str] = list(itertools.islice(self.offered, n))
        if self.sampler is not None:
            keys = yield from as_steps(self.sampler.draw(n, self.ctx))
        for key in keys:
            if key not in self.ctx.prompts:
                who = f"sampler {self.sampler.name}" if self.sampler else "the host's data loader"
                raise ConfigError(f"{who} named a prompt that does not exist: {key!r}")
            name = f"{key}#{self.ctx.step}.{len(self.ctx.started)}"
            group = Group(name, key, list(self.ctx.prompts[key]), self.ctx.max_tokens)
            group.extras.update(self.ctx.columns(key))
            self._take(group)
            self.ctx.started.append(group)
        return len(keys)

    def _generate(self, need: int) -> Steps:
        """Rounds of generation until enough groups are ready or none is under way; True if the phase was ended."""
        while self.under_way:
            new = yield from self._plan()
            if new:
                for part in self.all:
                    yield from as_steps(part.prepare(new, self.under_way, self.ctx))
            departed = self._depart()
            if len(self.ready) >= need or any(p.enough(self.ready, self.ctx) for p in self.parts["pruner"]):
                return True
            live = [r for g in self.under_way.values() for r in g.rollouts if r.state in LIVE]
            if live:
                stops = self._pauses()
                for r in live:
                    r.pause_at, r.state = min((s for s in stops if s > len(r)), default=None), "running"
                yield from self._wave(live)
            elif not new and not departed:
                return False  # only parked rollouts are left: `close` gets them
            settled = [g for g in self.under_way.values() if g.settled and not g.idle]
            if settled:
                for part in self.parts["pruner"]:
                    yield from as_steps(part.look(settled, self.ctx))
        return False

    def _wave(self, live: list[Rollout]) -> Steps:
        """Generate; where an allocator does not wait for the last rows, stop them and do without them."""
        share = min((p.finish_share for p in self.parts["allocator"]), default=1.0)
        yield Generate(live, "all" if self.waits_for_all else "group", share)
        late = [r for r in live if r.state == "running"] if share < 1 else []
        if late:
            yield Abort(late)
            for r in late:
                r.state = "pruned"

    def _plan(self) -> Steps:
        """Further rollouts for idle groups; a group for which no planner has any is complete.

        Where a planner ranks all groups of the step they are complete together: it may come back to one it passed over.
        """
        open_groups = [g for g in self.under_way.values() if g.fresh and not g.planned]
        idle = [g for g in open_groups if g.idle]
        if not idle or (self.waits_for_all and len(idle) < len(open_groups)):
            return []
        new: list[Rollout] = []
        if not self.parts["allocator"]:
            new = [r for g in idle if not g.rollouts for r in g.start(self._first_round())]
        for part in self.planners:
            busy = {r.group for r in new}
            new += (yield from as_steps(part.more([g for g in idle if g.id not in busy], self.ctx))) or []
        busy = {r.group for r in new}
        for g in idle:
            g.planned = not busy if self.waits_for_all else g.id not in busy
        return new

    def _first_round(self) -> int:
        """Rollouts a group begins with where no allocator says: group_size, less what a hint starts itself later."""
        size = self.ctx.group_size
        for part in self.parts["hint"]:
            reserved = part.reserve(self.ctx)
            if reserved >= size:
                raise ConfigError(
                    f"hint {part.name} starts {reserved} of a group's rollouts itself, which leaves none of its"
                    f" {size} to begin with; raise the group size, or lower what the hint starts"
                )
            size -= reserved
        return size

    def _depart(self) -> list[Group]:
        """Complete groups leave: edited by `complete`, then accepted into the batch or not; returns those that left.

        A group of an earlier step was edited when it was fresh, and is not edited again.
        """
        leaving = [g for g in self.under_way.values() if g.idle and (g.planned or not g.fresh)]
        for g in leaving:
            del self.under_way[g.id]
            self.departed.append(g)
            edited = dataclasses.replace(g, rollouts=list(g.rollouts), extras=dict(g.extras))
            if g.fresh:
                for part in self.all:
                    part.complete(edited, self.ctx)
            if edited.done() and all(part.accept(edited, self.ctx) for part in self.all):
                self.ready.append(edited)
        return leaving

    def _pauses(self) -> list[int]:
        """The response lengths at which some pruner wants to look."""
        stops: list[int] = []
        for part in self.parts["pruner"]:
            wanted = part.pause(self.ctx)
            stops += [wanted] if isinstance(wanted, int) else list(wanted or [])
        return stops

    def _end(self, need: int) -> Steps:
        left = list(self.under_way.values())
        running = [r for g in left for r in g.rollouts if r.state in ("new", "running", "paused")]
        if running:
            yield Abort(running)
        ready = sorted(self.ready[:need], key=lambda g: self.arrival[g.id])
        surplus = self.ready[need:]
        for part in self.all:
            yield from as_steps(part.close(left + surplus, self.ctx))
        for part in self.parts:
            if hasattr(part, "annotate"):
                yield from as_steps(part.annotate(ready, self.ctx))
        fresh = [g for g in self.departed if g.fresh]
        for part in self.all:
            part.observe(fresh, self.ctx)
        return ready
