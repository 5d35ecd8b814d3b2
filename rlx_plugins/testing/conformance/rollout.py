"""Checks of whole runs on the table host: they train, repeat themselves, resume, keep bounds and lose nothing."""

from __future__ import annotations

import io
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from ...core import randomness
from ...core.context import Context
from ...core.kinds import ROLLOUT_KINDS
from ...core.operations import Generate, Operation
from ...core.trajectory import Rollout
from ...hosts.table import TableTrainer
from ...hosts.table.engine import verify
from .comparing import difference
from .draws import global_draws
from .report import Failed, Skipped
from .setting import NO_NETWORK
from .subject import Reward, Subject

STEPS = 2
"""Steps of a run; a resumed one takes one more."""


def trains(subject: Subject) -> None:
    """A run on the table host trains: finite losses and weights."""
    if subject.kind in NO_NETWORK:
        raise Skipped("the table host has no engine and no network")
    _check_trained(subject.run, "")


def trains_unscorable(subject: Subject) -> None:
    """So does a run in which reward functions could not score some rollouts."""
    trainer = _rollout_side(subject)
    trainer.host.engine.score = sometimes_unscorable
    trainer.run(STEPS)
    _check_trained(trainer, " although some rewards are missing")


def sometimes_unscorable(r: Rollout) -> Reward:
    """No reward for every third rollout or so."""
    return (None, {}) if randomness.uniform(r.group, r.slot) < 0.3 else verify(r)


def _check_trained(trainer: TableTrainer, when: str) -> None:
    losses = [entry["loss"] for entry in trainer.log]
    if not all(map(math.isfinite, losses)) or not bool(torch.isfinite(trainer.host.policy.theta).all()):
        seen = f"losses {', '.join(f'{x:.4g}' for x in losses)}"
        raise Failed(f"finite losses and weights{when}", seen, "look for a division by 0, or NaN that is not masked")


def repeats(subject: Subject) -> None:
    """Two runs from the same seed are the same, whatever the global generators would draw."""
    runs = [_rollout_side(subject) for _ in range(2)]
    for seed, run in enumerate(runs):
        with global_draws(seed):
            run.run(STEPS)
    if (found := difference_of_runs(runs[1], runs[0], STEPS)) is not None:
        raise Failed("the same run twice", found, 'draw with ctx.uniform("name/draw", key) or ctx.generator')


def resumes(subject: Subject) -> None:
    """A run that is killed and resumed from its checkpoint is the run."""
    if subject.kind in NO_NETWORK:
        raise Skipped("the table host has no engine and no network")
    try:
        whole, resumed = interrupted(subject.setting.trainer, STEPS, 1)
    except UnreadableCheckpoint as error:
        raise Failed(
            "state that torch.load(weights_only=True) reads back",
            str(error),
            "keep plain values and tensors in state()",
        ) from error
    if (found := difference_of_runs(resumed, whole, 1)) is not None:
        raise Failed(
            "a resumed run that equals the uninterrupted one",
            f"one step after it, {found}",
            "declare every field that changes from step to step with rlx.state()",
        )


class UnreadableCheckpoint(Exception):
    """The checkpoint can't be written, or can't be read without running code."""


def interrupted(make: Callable[[], TableTrainer], before: int, after: int) -> tuple[TableTrainer, TableTrainer]:
    """A run of `before + after` steps, and one that starts from the checkpoint written in between."""
    whole, resumed = make(), make()
    whole.run(before)
    file = io.BytesIO()
    try:
        torch.save(whole.state_dict(), file)
        file.seek(0)
        saved = torch.load(file, weights_only=True)
    except Exception as error:  # pickling raises anything
        raise UnreadableCheckpoint(str(error).splitlines()[0]) from error
    resumed.load_state_dict(saved)
    for run in (whole, resumed):
        with global_draws(0):
            run.run(after)
    return whole, resumed


def difference_of_runs(run: TableTrainer, other: TableTrainer, steps: int) -> str | None:
    """The first difference in the last `steps` entries of the logs, the weights or the parts' states, bit by bit."""
    pairs = {
        "log": (run.log[-steps:], other.log[-steps:]),
        "weights": (run.host.policy.theta, other.host.policy.theta),
        "state": (run.parts.state_dict(), other.parts.state_dict()),
    }
    for name, (ours, theirs) in pairs.items():
        if (found := difference(ours, theirs, tolerance=0.0)) is not None:
            return name + found
    return None


def within_max_tokens(subject: Subject) -> None:
    """No response, hint included, is longer than allowed; tool output at its end is the host's."""
    trainer = _rollout_side(subject)
    generated = [r for step in watched_steps(trainer, STEPS) for r in step.rollouts.values()]
    longest = max(len(r) - (len(r.segments[-1].tokens) if r.segments[-1].source == "tool" else 0) for r in generated)
    if longest > trainer.max_tokens:
        raise Failed(
            f"responses of at most {trainer.max_tokens} tokens",
            f"one of {longest}",
            "leave rollout.max_tokens as it is, and cut what is put before the answer",
        )


def loses_no_rollout(subject: Subject) -> None:
    """Every rollout that was started stays in its group and is finished, pruned, or parked and continued later."""
    steps = watched_steps(_rollout_side(subject), STEPS + 1)
    for step, following in zip(steps, [*steps[1:], None]):
        for (group, slot), r in step.rollouts.items():
            if (group, slot) in step.left_their_group:
                seen = "is no longer in its group"
            elif r.state == "parked" and following is not None and (group, slot) not in following.rollouts:
                seen = "was parked and is not continued in the next step"
            elif r.state not in ("finished", "pruned", "parked"):
                seen = f"is left {r.state!r}"
            else:
                continue
            raise Failed(
                "an end for every rollout",
                f"rollout {slot} of group {group} {seen}",
                "keep rollouts in group.rollouts; set those given up to 'pruned', bring parked ones back in intake",
            )


@dataclass
class Step:
    """What was generated in a step, by group and slot, and which of it stands in a started group no more at its end."""

    rollouts: dict[tuple[str, int], Rollout] = field(default_factory=dict)
    left_their_group: set[tuple[str, int]] = field(default_factory=set)


def watched_steps(trainer: TableTrainer, steps: int) -> list[Step]:
    """Train, and keep what was generated."""
    seen: list[Step] = []
    execute, rollouts = trainer.host.execute, trainer.rollouts

    def watched_execute(operation: Operation) -> Any:
        if isinstance(operation, Generate):
            seen[-1].rollouts.update({(r.group, r.slot): r for r in operation.rollouts})
        return execute(operation)

    def watched_rollouts(ctx: Context) -> Any:
        seen.append(Step())
        batch = rollouts(ctx)
        started = {g.id: [id(r) for r in g.rollouts] for g in ctx.started}
        seen[-1].left_their_group = {
            key for key, r in seen[-1].rollouts.items() if r.group in started and id(r) not in started[r.group]
        }
        return batch

    trainer.host.execute, trainer.rollouts = watched_execute, watched_rollouts  # type: ignore[method-assign]
    trainer.run(steps)
    return seen


def _rollout_side(subject: Subject) -> TableTrainer:
    """A run with a plug-in that acts during the rollout."""
    if subject.kind not in ROLLOUT_KINDS:
        raise Skipped("it does not act during the rollout")
    return subject.setting.trainer()
