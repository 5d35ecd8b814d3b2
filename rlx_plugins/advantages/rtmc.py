"""RTMC: independent rollouts merged into a tree of states, and Monte Carlo step advantages on it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from ..core.batch import RolloutBatch
from ..core.context import Context
from ..core.kinds import Advantage, Columns
from ..core.params import param
from ..core.registry import register
from ..core.segments import Segments, counted
from ..core.terms import masked
from ..core.trajectory import Group
from ._discounted import discounted_returns
from ._ragged import padded_ids, ragged
from ._signatures import numbered, signature_function

SMALLEST_STD = 1e-8
"""A group's std of step advantages at or below this is not divided by; the port's."""


class Steps(NamedTuple):
    """Per row and step [B,S]: dense numbers of the state in its group and of the state-action pair; which steps exist
    in scorable rows; steps per row [B]."""

    state: Tensor
    pair: Tensor
    there: Tensor
    length: Tensor


@register("advantage", "rtmc")
@dataclass
class RTMC(Advantage):
    """Pools rollouts of a prompt that passed through equal states and credits each step with what its action returned
    there beyond the state's value, which is drawn to the group's mean reward where the state was seen rarely.

    G_t = discounted sum of the step rewards from t on, the rollout's reward added to its last step's;
    Q(s,a) = mean of G over the rows that took a in s, at its first occurrence in each;   N(s,a) their number;
    V(s) = sum_a N Q / N(s);   V'(s) = (N(s) V(s) + prior_count mean_g) / (N(s) + prior_count);   A_t = Q(s,a) - V'(s).

    Reads rewards [B] (NaN = unscorable), group [B], response_mask and turn_ids [B,T] (step of each token, -1: none)
    and, per row, state_ids and action_ids: one signature (a string, a number, a tuple) for each step; step_rewards (per
    row one number for each step) where the batch has it. signatures="column": rollout code returns them;
    "turns": an action is its tokens, a state the set of actions and tool outputs so far; "module:function": your own,
    called with each Rollout, returning (states, actions). Returns advantages [B,T], 0 where masked and for unscorable
    rows, which enter no statistic.

    The paper's signatures for coding agents are coarser (operation and file, no contents), which doubles the overlap.
    With `discount` below 1, early steps of a group of equal rewards get a small advantage; that is the formula. So
    would a group of one, whose advantage is 0 here; singleton="raw" keeps the formula's. Reconstructed: what happens to
    unscorable rows.
    """

    paper = "Rollout-Tree Monte Carlo (RTMC), arXiv 2604.11037"

    discount: float = param(0.99, gt=0, le=1, doc="per step; the paper's gamma")
    prior_count: float = param(2.0, ge=0, doc="visits the group's mean reward is worth; the paper's n_prior")
    normalize: bool = param(False, doc="divide by the population std of the group's step advantages; port option")
    signatures: str = param("column", doc='"column", "turns", or a function "module:function" of a rollout')
    singleton: Literal["zero", "raw"] = param("zero", doc="a group of one: advantage 0, or the formula's")

    def check(self) -> None:
        if self.signatures != "column":
            signature_function(self.signatures)

    @property
    def requires(self) -> frozenset[str]:
        given = {"state_ids", "action_ids"} if self.signatures == "column" else set[str]()
        return frozenset({"turn_ids"} | given)

    @property
    def provides(self) -> frozenset[str]:
        return frozenset() if self.signatures == "column" else frozenset({"state_ids", "action_ids"})

    @property
    def idle_hooks(self) -> frozenset[str]:
        return frozenset({"annotate"} if self.signatures == "column" else ())

    def annotate(self, groups: list[Group], ctx: Context) -> None:
        if self.signatures == "column":
            return
        sign = signature_function(self.signatures)
        for rollout in (r for g in groups for r in g.done()):
            states, actions = sign(rollout)
            rollout.extras |= {"state_ids": list(states), "action_ids": list(actions)}

    def __call__(self, batch: RolloutBatch) -> Columns:
        steps, _ = self.step_advantages(batch)
        turn = torch.where(batch.response_mask, batch.turn_ids, -1).clamp_(-1, steps.shape[1])
        return {"advantages": torch.nn.functional.pad(steps, (1, 1)).gather(1, turn.add_(1))}

    def step_advantages(self, batch: RolloutBatch) -> tuple[Tensor, Tensor]:
        """A [B,S], 0 where a row has no such step and for unscorable rows, and the number of steps [B]."""
        rewards, groups = batch.rewards.double(), batch.groups  # `normalize` would blow float32's rounding up
        steps = self.steps(batch)
        returns = self.returns(batch, steps)
        first = steps.there & _first_visits(steps.pair)
        value, _ = _means(returns, steps.pair, first)
        state_value, visits = _means(returns, steps.state, first)
        mean = groups.spread(groups.mean(rewards))[:, None]
        prior = self.prior_count
        shrunk = (visits * state_value + prior * mean) / (visits + prior).clamp(min=torch.finfo(value.dtype).tiny)
        live = steps.there
        if self.singleton == "zero":
            live = live & (groups.spread(groups.count(rewards)) > 1)[:, None]
        advantages = masked(value - shrunk, live)
        if self.normalize:
            advantages = _normalised(advantages, live, groups)
        return advantages.to(batch.dtype), steps.length

    def steps(self, batch: RolloutBatch) -> Steps:
        """The steps of every row, states and pairs numbered within their group."""
        state = padded_ids(numbered(batch.state_ids), batch.device)
        action = padded_ids(numbered(batch.action_ids), batch.device, state.shape[1])
        group = batch.groups.index[:, None].expand_as(state)
        there = (state >= 0) & counted(batch.rewards)[:, None]
        in_group = _dense(group, state)
        return Steps(in_group, _dense(in_group, action), there, (state >= 0).sum(1))

    def returns(self, batch: RolloutBatch, steps: Steps) -> Tensor:
        """G [B,S], float64."""
        rewards = batch.rewards.double()
        place = torch.arange(steps.state.shape[1], device=rewards.device)
        last = (place == steps.length[:, None] - 1) & steps.there
        x = masked(rewards[:, None], last)
        if batch.has("step_rewards"):
            given, _ = ragged(batch, "step_rewards")
            given = torch.nan_to_num(given, nan=0.0)[:, : x.shape[1]]
            x = x + torch.nn.functional.pad(given, (0, x.shape[1] - given.shape[1]))
        return discounted_returns(x, steps.there, self.discount)


def _dense(a: Tensor, b: Tensor) -> Tensor:
    """One number per pair of entries of two integer tensors, equal pairs alike, from 0 without gaps."""
    if not a.numel():
        return torch.zeros_like(a)
    b = b - b.min()
    return (a * (b.max() + 1) + b).unique(return_inverse=True)[1]


def _first_visits(pair: Tensor) -> Tensor:
    """[B,S] bool: the first step of the row with its pair."""
    row = torch.arange(len(pair), device=pair.device)[:, None].expand_as(pair)
    number = _dense(row, pair).flatten()
    place = torch.arange(number.numel(), device=pair.device)
    first = torch.full_like(place, number.numel()).scatter_reduce(0, number, place, "amin")
    return (first[number] == place).reshape(pair.shape)


def _means(x: Tensor, number: Tensor, where: Tensor) -> tuple[Tensor, Tensor]:
    """Mean of `x` [B,S] over the entries of `where` with the same number, and how many they are, at every entry."""
    alike = Segments(number.flatten())
    mean, n = alike.mean(x.flatten(), where.flatten()), alike.count(x.flatten(), where.flatten())
    return alike.spread(mean).reshape(x.shape), alike.spread(n).reshape(x.shape)


def _normalised(advantages: Tensor, live: Tensor, groups: Segments) -> Tensor:
    """Divided by the population std over the steps of each group where that is not 0."""
    steps = Segments(groups.index[:, None].expand_as(advantages).flatten())
    std = steps.spread(steps.std(advantages.flatten(), live.flatten(), ddof=0)).reshape(advantages.shape)
    return torch.where(std > SMALLEST_STD, advantages / std.clamp(min=SMALLEST_STD), advantages)
