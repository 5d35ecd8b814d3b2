"""Pilot-Commit: pilot rollouts screen prompts; the rest of the budget goes to those that are neither easy nor hard."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

from ..core.context import Context
from ..core.errors import ConfigError, DataError
from ..core.kinds import Allocator
from ..core.params import param
from ..core.registry import register
from ..core.state import state
from ..core.trajectory import Group, Rollout

PILOTS = "pilot_commit_pilots"
"""Entry of `group.extras`: the buffer's entry of a group that gets its commit rollouts."""

Verdict = Literal["passed", "too_easy", "too_hard"]


@register("allocator", "pilot_commit")
@dataclass
class PilotCommit(Allocator):
    """A prompt first gets `n_pilot` rollouts; if their success rate lies in [lower, 1 - upper] it waits in a buffer for
    a place in a training batch and then gets `n_commit` more.

    Each round generates, in one call, the commit rollouts of prompts that passed in an EARLIER round and the pilots of
    `candidates * groups` new prompts; rounds go on until the step has its groups. A training group is the kept pilots
    and the commits: `n_effective` pilots of largest variance (half from the best, half from the worst, earlier ones
    first). Prompts wait at most `max_age` steps, and not beyond the end of an epoch. Those with a pilot success rate of
    at least `exclude` are left out from the next epoch on.

    New prompts are those the sampler draws or the host's data loader offers; an epoch is over at the first step before
    which as many prompts were started as the dataset has. Success rates are means of rewards scaled to [0, 1] from
    [reward_low, reward_high]; NaN rewards are left out, and a prompt without a scorable pilot is dropped.

    Kept pilots of an earlier step carry the engine's log-probabilities of then as `logp_behavior` (unknown where the
    engine reports none): train with `ratio.denominator: logp_behavior`. They are never shown to `observe` twice.

    Deviations from the release: pilots are down-sampled and prompts ordered even when the buffer holds no more prompts
    than needed; within a side the earlier rollouts are kept, not random ones; equal variances are told apart by age,
    free of rounding; a group left with fewer than two rollouts is dropped and another takes its place.
    """

    paper = "Pilot-Commit, arXiv 2605.26606"
    scope = "batch"
    refills = True
    capabilities = frozenset({"rounds"})
    provides = frozenset({"logp_behavior"})

    n_pilot: int = param(16, ge=1, doc="pilot rollouts per new prompt; the paper's runs: 8, 16, 32")
    n_commit: int = param(48, ge=1, doc="further rollouts of a prompt that passed; the paper's runs: 24, 48, 96")
    n_effective: int | None = param(None, ge=0, doc="pilots kept for training; None: all; 0: commits only")
    lower: float = param(0.125, ge=0, le=1, doc="least pilot success rate that passes; the paper's runs")
    upper: float = param(0.25, ge=0, le=1, doc="1 - upper is the largest that passes; the paper's runs")
    exclude: float | None = param(
        1.0, gt=0, le=1, doc="pilot success rate from which a prompt is done with; None: never"
    )
    candidates: float = param(3.0, gt=0, doc="new prompts per round, in groups of the step; the release's 3")
    order: Literal["max_variance", "random", "recent", "fifo"] = param(
        "max_variance", doc="who leaves the buffer first"
    )
    max_age: int = param(4, ge=0, doc="steps a prompt may wait; the release's 4")
    max_rounds: int = param(10, ge=0, doc="rounds per step after which it is an error; 0: unbounded")
    capacity: int | None = param(None, ge=1, doc="prompts in the buffer, newest kept; None: bounded by age alone")
    reward_low: float = param(0.0, doc="reward that counts as 0 in a success rate")
    reward_high: float = param(1.0, doc="reward that counts as 1 in a success rate")

    buffer: list = state(factory=list)
    excluded: list = state(factory=list)
    excluded_next: list = state(factory=list)
    started: int = state(0)
    step: int = state(-1)
    rounds: int = state(0)

    def check(self) -> None:
        if self.lower > 1 - self.upper:
            raise ConfigError(
                f"allocator pilot_commit.lower: no success rate lies in [{self.lower:g}, {1 - self.upper:g}];"
                " lower + upper must be at most 1"
            )
        if self.n_effective is not None and self.n_effective > self.n_pilot:
            raise ConfigError(
                f"allocator pilot_commit.n_effective: at most n_pilot={self.n_pilot}, got {self.n_effective}"
            )
        if self.reward_low >= self.reward_high:
            raise ConfigError(f"allocator pilot_commit.reward_low: must be below reward_high={self.reward_high:g}")

    def intake(self, need: int, ctx: Context) -> tuple[list[Group], int]:
        self._begin_round(ctx)
        chosen = self._choose(need, ctx)
        self.buffer = [entry for entry in self.buffer if all(entry is not c for c in chosen)]
        return [self._commit_group(entry, ctx) for entry in chosen], math.ceil(self.candidates * ctx.groups)

    def more(self, idle: list[Group], ctx: Context) -> list[Rollout]:
        new: list[Rollout] = []
        for g in idle:
            if g.rollouts:
                continue
            if PILOTS in g.extras:
                commits = g.start(self.n_commit)
                for r in commits:
                    r.slot += self.n_pilot
                new += commits
            else:
                self.started += 1
                if g.prompt_key not in self.excluded:
                    new += g.start(self.n_pilot)
        return new

    def complete(self, group: Group, ctx: Context) -> None:
        """A committed group gets its kept pilots; one that only had pilots waits, or is done with."""
        entry = group.extras.pop(PILOTS, None)
        if entry is None:
            self._screen(group, ctx)
            group.rollouts = []
            return
        kept = [Rollout.from_plain(r) for r in self.kept_pilots(entry)]
        for r in kept:
            r.group = group.id
            if entry["step"] < ctx.step:
                for s in r.segments:
                    if s.from_model and s.logp_behavior is None:
                        s.logp_behavior = s.logp
        group.rollouts = kept + group.rollouts
        if len(group.done()) < 2:
            group.rollouts = []

    def observe(self, groups: list[Group], ctx: Context) -> None:
        young = [entry for entry in self.buffer if ctx.step - entry["step"] <= self.max_age]
        ctx.log("allocator/pilot_commit_flushed", len(self.buffer) - len(young))
        self.buffer = young if self.capacity is None else young[-self.capacity :]
        ctx.log("allocator/pilot_commit_buffer", len(self.buffer))
        ctx.log("allocator/pilot_commit_rounds", self.rounds)

    def success_rate(self, pilots: list[Rollout]) -> float | None:
        """Mean scaled reward of the scorable pilots; None without any."""
        scaled = [self._scaled(r.reward) for r in pilots if r.scorable and r.reward is not None]
        return sum(scaled) / len(scaled) if scaled else None

    def verdict(self, rate: float) -> Verdict:
        """What a pilot success rate means for the prompt; both ends of the band pass."""
        if rate > 1 - self.upper:
            return "too_easy"
        return "too_hard" if rate < self.lower else "passed"

    def _begin_round(self, ctx: Context) -> None:
        if ctx.step != self.step:
            self.step, self.rounds = ctx.step, 0
            if self.started >= len(ctx.prompts):
                self._turn_epoch(len(ctx.prompts))
        if self.max_rounds and self.rounds >= self.max_rounds:
            raise DataError(
                f"allocator pilot_commit: step {ctx.step} has not got its {ctx.groups} groups in {self.rounds} rounds;"
                f" too few prompts have a pilot success rate in [{self.lower:g}, {1 - self.upper:g}] (widen the band,"
                " or raise allocator.candidates or allocator.max_rounds)"
            )
        self.rounds += 1

    def _turn_epoch(self, prompts: int) -> None:
        self.started %= prompts
        self.buffer = []
        self.excluded, self.excluded_next = self.excluded + self.excluded_next, []

    def _choose(self, need: int, ctx: Context) -> list[dict[str, Any]]:
        """The entries of the buffer that get the free places."""
        recent = list(reversed(self.buffer))
        if self.order == "fifo":
            recent = self.buffer
        elif self.order == "random":
            recent = sorted(self.buffer, key=lambda e: ctx.uniform("pilot_commit/order", self.rounds, e["id"]))
        elif self.order == "max_variance":
            recent.sort(key=lambda e: -round(e["rate"] * (1 - e["rate"]), 12))
        return recent[:need]

    def _commit_group(self, entry: dict[str, Any], ctx: Context) -> Group:
        """A group for the commits alone; the pilots join it when it is complete."""
        key = entry["prompt_key"]
        group = Group(f"{entry['id']}/commit", key, list(entry["prompt"]), ctx.max_tokens)
        group.extras.update(ctx.columns(key))
        group.extras[PILOTS] = entry
        return group

    def _screen(self, group: Group, ctx: Context) -> None:
        rate = self.success_rate(group.rollouts)
        if rate is None:
            return
        verdict, key = self.verdict(rate), group.prompt_key
        name = f"allocator/pilot_commit_{verdict}"
        ctx.log(name, ctx.metrics.get(name, 0.0) + 1)
        if self.exclude is not None and rate >= self.exclude and key not in self.excluded_next:
            self.excluded_next.append(key)
        if verdict == "passed":
            entry = {
                "id": group.id,
                "prompt_key": key,
                "prompt": list(group.prompt),
                "step": ctx.step,
                "rate": rate,
                "pilots": [{**r.to_plain(), "tag": r.tag or "pilot"} for r in group.done()],
            }
            self.buffer = [e for e in self.buffer if e["prompt_key"] != key] + [entry]

    def kept_pilots(self, entry: dict[str, Any]) -> list[dict[str, Any]]:
        """The pilots of a buffer entry that are trained on, as plain values."""
        scored = [p for p in entry["pilots"] if p["reward"] is not None and not math.isnan(p["reward"])]
        n = self.n_pilot if self.n_effective is None else self.n_effective
        return [scored[i] for i in largest_variance([self._scaled(p["reward"]) for p in scored], n)]

    def _scaled(self, reward: float) -> float:
        return min(max((reward - self.reward_low) / (self.reward_high - self.reward_low), 0.0), 1.0)


def largest_variance(rewards: list[float], n: int) -> list[int]:
    """Positions of `n` rewards of large variance, ascending: floor(n/2) of the largest, the others of the smallest.

    With rewards of 0 and 1 a side that is too short is filled from the other; equal rewards go by position.
    """
    best_first = sorted(range(len(rewards)), key=lambda i: (-rewards[i], i))
    best = best_first[: n // 2]
    worst_first = sorted(set(range(len(rewards))) - set(best), key=lambda i: (rewards[i], i))
    return sorted(best + worst_first[: n - len(best)])
