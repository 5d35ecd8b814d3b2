"""An executor for the rollout program that follows a script: no model, rewards and lengths given in advance."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..core.operations import Abort, Forward, Generate, Operation
from ..core.trajectory import Rollout, Segment

Rewards = Callable[[Rollout], float | None]


def table(rewards: Mapping[str, Sequence[float]]) -> Rewards:
    """Rewards by prompt key and slot; from the beginning again where a prompt has more rollouts than entries."""

    def reward(rollout: Rollout) -> float:
        row = rewards[rollout.prompt_key]
        return row[rollout.slot % len(row)]

    return reward


class ScriptedExecutor:
    """Carries out operations at once: `drive(rollout_program(parts, ctx), ScriptedExecutor(reward))`.

    reward    reward of a finished rollout; None: the engine lost it, and its state becomes "pruned"
    length    tokens of its own after which a rollout ends by itself; where not all are waited for, the shortest do
    logp      log-probability reported for every token; None: the engine reports none
    version   weight updates the sampling policy has seen
    forward   answers a `Forward`, one result per rollout
    operations, launched   what was asked so far: every operation, and the rollouts new to each `Generate`
    """

    def __init__(
        self,
        reward: Rewards,
        *,
        length: Callable[[Rollout], int] | int = 1,
        logp: float | None = -1.0,
        version: int = 0,
        forward: Callable[[Forward], list[Any]] | None = None,
    ):
        self.reward, self.length, self.logp, self.version, self.forward = reward, length, logp, version, forward
        self.operations: list[Operation] = []
        self.launched: list[list[Rollout]] = []

    def __call__(self, operation: Operation) -> Any:
        self.operations.append(operation)
        if isinstance(operation, Generate):
            seen = {id(r) for rows in self.launched for r in rows}
            self.launched.append([r for r in operation.rollouts if id(r) not in seen])
            rows = operation.rollouts
            if operation.enough < len(rows):
                rows = sorted(rows, key=self._own_length)[: operation.enough]
            for r in rows:
                self._extend(r)
            return None
        if isinstance(operation, Abort):
            for r in operation.rollouts:
                r.state, r.stop = "parked", "aborted"
            return None
        if self.forward is None:
            raise AssertionError(f"the script has no answer to a Forward of {operation.want!r}")
        return self.forward(operation)

    def _own_length(self, r: Rollout) -> int:
        return self.length if isinstance(self.length, int) else self.length(r)

    def _extend(self, r: Rollout) -> None:
        """One segment, to the rollout's own end, its `max_tokens` or its `pause_at`, whichever comes first."""
        end = min(self._own_length(r) + sum(len(s.tokens) for s in r.segments if not s.from_model), r.max_tokens)
        pauses = r.pause_at is not None and r.pause_at < end
        n = (r.pause_at if pauses else end) - len(r)  # type: ignore[operator]
        if n > 0:
            r.segments.append(Segment([1] * n, "policy", None if self.logp is None else [self.logp] * n, self.version))
        if pauses:
            r.state = "paused"
            return
        r.finish("eos" if end < r.max_tokens else "length")
        r.reward = self.reward(r)
        if r.reward is None:
            r.state = "pruned"
