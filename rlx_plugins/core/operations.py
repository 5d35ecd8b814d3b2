"""Operations a hook of the rollout side may `yield`; the host executes them with its own engine and reward code."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from .trajectory import Rollout


@dataclass
class Generate:
    """Extend the rollouts until each finishes or reaches its `pause_at`; finished rows come back scored.

    `until="group"` lets the host return as soon as one group has settled (nobody waits for the longest row of the
    batch); `"all"` waits for every row. A host without the capability `until_group` treats both as "all".
    """

    rollouts: list[Rollout]
    until: Literal["group", "all"] = "group"


@dataclass
class Abort:
    """Stop the rollouts where they are: state "parked", stop "aborted", partial tokens and log-probs kept."""

    rollouts: list[Rollout]


@dataclass
class Forward:
    """Score the rollouts with the current policy, without gradient; one result per rollout, in order.

    `want`: "logp", a list of floats, one per response token, under prompt + context; "hidden", the last layer's hidden
    state [H] of the last token; "prompt_entropy", the mean next-token entropy (nats) over the prompt's tokens.
    """

    rollouts: list[Rollout]
    want: Literal["logp", "hidden", "prompt_entropy"]


Operation = Generate | Abort | Forward
Steps = Generator[Operation, Any, Any]


def as_steps(result: Any) -> Steps:
    """Run a hook's result as part of a program: a generator's operations are passed on, a plain value is returned."""
    if isinstance(result, Iterator):
        return (yield from result)
    return result
