"""SAO: one rollout per prompt, a critic's values as baseline, and GAE that skips what the model did not write."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..core.batch import RolloutBatch
from ..core.errors import DataError
from ..core.kinds import Advantage, Columns
from ..core.params import param
from ..core.registry import register
from ..core.segments import counted, wide
from ..core.terms import masked
from ._token_column import token_column
from ._whitened import whitened


class Estimate(NamedTuple):
    """advantages and returns (the critic's targets) [B,T], 0 where masked; lam [B], the actor's lambda per row."""

    advantages: Tensor
    returns: Tensor
    lam: Tensor


@register("advantage", "sao")
@dataclass
class SAO(Advantage):
    """Generalised advantage estimation over the model's own tokens only: tool output is taken out of the chain, and the
    last token of an action is linked to the first of the next. The actor's lambda grows with the rollout's length.

    Over the model tokens p_1 .. p_n of a row, with the reward on p_n (or token_rewards [B,T]) and V(p_{n+1}) = 0:
    delta_j = rho_j + discount V(p_{j+1}) - V(p_j);   A_j = delta_j + discount lam A_{j+1};
    lam = max(0, 1 - 1 / (lambda_scale n));   the critic's target is the same sum with `critic_lambda`, plus V(p_j).

    Reads values [B,T] (the critic's, on the scale of the rewards; a tensor or a list per row; those at masked positions
    are never read), rewards [B] (NaN = unscorable), response_mask [B,T]; group is not used: one rollout per prompt is
    the normal case. Returns advantages [B,T], 0 where masked and for unscorable rows; returns [B,T], the critic's
    targets; gae_lambda [B]. DataError where a value at a model token is not finite. A rollout that was cut off counts
    as finished.

    The critic is the host's (verl's critic worker); its schedule in the paper: two updates per actor update, attention
    frozen, 10 warm-up steps. Advantages are not whitened in the paper.
    """

    paper = "SAO, arXiv 2607.07508"
    requires = frozenset({"values"})
    provides = frozenset({"returns", "gae_lambda"})
    scope = "row"

    lambda_scale: float = param(1.5, gt=0, doc="how fast the actor's lambda nears 1 with length; the paper's alpha")
    discount: float = param(1.0, ge=0, le=1, doc="per model token; the paper's gamma")
    actor_lambda: float | None = param(None, ge=0, le=1, doc="a fixed lambda instead; None: by length, as in the paper")
    critic_lambda: float = param(1.0, ge=0, le=1, doc="lambda of the critic's targets; the paper's 1")
    whiten: bool = param(False, doc="normalise the advantages over the batch's tokens; the paper does not")

    def __call__(self, batch: RolloutBatch) -> Columns:
        scorable = counted(batch.rewards)[:, None]
        found = self.estimate(batch)
        advantages = masked(found.advantages, scorable)
        if self.whiten:
            advantages = whitened(advantages, batch.response_mask & scorable)
        return {"advantages": advantages, "returns": masked(found.returns, scorable), "gae_lambda": found.lam}

    def estimate(self, batch: RolloutBatch) -> Estimate:
        """Advantages, targets and lambda."""
        mask, n = batch.response_mask, batch.lengths
        values = wide(token_column(batch, "values", torch.nan))
        bad = (mask & ~torch.isfinite(values)).any(1).nonzero()
        if len(bad):
            raise DataError(f"advantage sao: the critic's value at a model token of row {int(bad[0, 0])} is not finite")
        lam = self._lambda(n).to(values.dtype)
        order = (~mask).long().argsort(dim=1, stable=True)  # the model tokens of a row, moved together to its left
        there = mask.gather(1, order)
        values = masked(values.gather(1, order), there)
        rewards = self._rewards(batch, order, there).to(values.dtype)
        delta = masked(rewards + self.discount * _next(values) - values, there)
        advantages = _discounted(delta, self.discount * lam[:, None].expand_as(delta))
        targets = _discounted(delta, torch.full_like(delta, self.discount * self.critic_lambda)) + values
        back = torch.zeros_like(values)
        return Estimate(back.scatter(1, order, masked(advantages, there)), back.scatter(1, order, targets), lam)

    def _lambda(self, n: Tensor) -> Tensor:
        """lam [B] of rows with n [B] model tokens; 0 for an empty one."""
        if self.actor_lambda is not None:
            return torch.full(n.shape, self.actor_lambda, dtype=torch.float64, device=n.device)
        return (1 - 1 / (self.lambda_scale * n.double().clamp(min=1))).clamp(min=0) * (n > 0)

    def _rewards(self, batch: RolloutBatch, order: Tensor, there: Tensor) -> Tensor:
        """rho [B,T] along the model tokens of each row."""
        if batch.has("token_rewards"):
            return masked(wide(batch.token_rewards).gather(1, order), there)
        last = torch.arange(1, there.shape[1] + 1, device=there.device) == batch.lengths[:, None]
        return masked(wide(batch.rewards)[:, None], last & counted(batch.rewards)[:, None])


def _next(x: Tensor, by: int = 1) -> Tensor:
    """`x` [B,T] moved `by` places to the left, zeros behind."""
    return torch.nn.functional.pad(x[:, by:], (0, by))


def _discounted(x: Tensor, factor: Tensor) -> Tensor:
    """y_t = x_t + factor_t y_{t+1} along a row; by doubling: after k rounds y_t has summed 2^k terms."""
    step = 1
    while step < x.shape[1]:
        x = x + factor * _next(x, step)
        factor = factor * _next(factor, step)
        step *= 2
    return x
