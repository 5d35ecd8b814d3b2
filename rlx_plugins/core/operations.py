"""Operations a hook of the rollout side may `yield`; the host executes them with its own engine and reward code."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from .trajectory import Rollout


@dataclass
class Generate:
    """Extend the rollouts until each finishes or reaches its `pause_at`; finished rows come back scored.

    `until="group"` lets the host return as soon as one group has settled (nobody waits for the longest row of the
    batch); `"all"` waits for every row. A host without the capability `until_group` treats both as "all".
    `share` below 1 lets it return once that share of the rollouts has settled; the others are left running.
    """

    rollouts: list[Rollout]
    until: Literal["group", "all"] = "group"
    share: float = 1.0

    @property
    def enough(self) -> int:
        """How many settled rollouts are enough to return."""
        return max(1, math.ceil(self.share * len(self.rollouts) - 1e-9))


@dataclass
class Abort:
    """Stop the rollouts where they are: state "parked", stop "aborted", partial tokens and log-probs kept."""

    rollouts: list[Rollout]


@dataclass
class Forward:
    """Score the rollouts with the current policy, without gradient; one result per rollout, in order.

    `want`: "logp", a list of floats, one per response token, under prompt + context; "entropy", likewise, the entropy
    (nats) of the distribution each response token was drawn from; "hidden", the last layer's hidden state [H] of the
    last token; "prompt_entropy", the mean next-token entropy (nats) over the prompt's tokens.
    """

    rollouts: list[Rollout]
    want: Literal["logp", "entropy", "hidden", "prompt_entropy"]


@dataclass
class Unlearn:
    """One plain gradient step, learning rate `lr`, on a copy of the sampling weights; rollouts come from it until
    `Restore`. The trained weights stay as they are.

    The copy descends `loss(logp, mask)`, a scalar: logp [R,T] log-probabilities of the rollouts' response tokens under
    the copy, with gradient, mask [R,T] bool the model's own ones. Rows sampled from the copy carry `logp_behavior`.
    """

    rollouts: list[Rollout]
    loss: Callable[[Tensor, Tensor], Tensor]
    lr: float


@dataclass
class Restore:
    """Sample from the weights before `Unlearn` again; the copy is dropped."""


Operation = Generate | Abort | Forward | Unlearn | Restore
Steps = Generator[Operation, Any, Any]


def as_steps(result: Any) -> Steps:
    """Run a hook's result as part of a program: a generator's operations are passed on, a plain value is returned."""
    if isinstance(result, Iterator):
        return (yield from result)
    return result
