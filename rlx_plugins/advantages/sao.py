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
from ._discounted import Packing, discounted_sums
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

    lambda_scale: float = param(1.5, gt=0, doc="how fast the actor's lambda nears 1 with length; the paper's alpha")
    discount: float = param(1.0, ge=0, le=1, doc="per model token; the paper's gamma")
    actor_lambda: float | None = param(None, ge=0, le=1, doc="a fixed lambda instead; None: by length, as in the paper")
    critic_lambda: float = param(1.0, ge=0, le=1, doc="lambda of the critic's targets; the paper's 1")
    whiten: bool = param(False, doc="normalise the advantages over the batch's tokens; the paper does not")

    @property
    def scope(self) -> str:  # type: ignore[override]
        return "batch" if self.whiten else "row"

    def __call__(self, batch: RolloutBatch) -> Columns:
        scorable = counted(batch.rewards)[:, None]
        found = self.estimate(batch)
        advantages = masked(found.advantages, scorable)
        if self.whiten:
            advantages = whitened(advantages, batch.response_mask & scorable)
        return {"advantages": advantages, "returns": masked(found.returns, scorable), "gae_lambda": found.lam}

    def estimate(self, batch: RolloutBatch) -> Estimate:
        """Advantages, targets and lambda."""
        packing = Packing(batch.response_mask)
        values = packing.pack(self._values(batch))
        lam = self._lambda(batch.lengths).to(values.dtype)
        delta = self._rewards(batch, packing).to(values.dtype) - values
        delta[:, :-1] += self.discount * values[:, 1:]
        advantages = discounted_sums(delta, self.discount * lam)
        targets = discounted_sums(delta, values.new_full((1,), self.discount * self.critic_lambda)) + values
        return Estimate(packing.unpack(advantages), packing.unpack(targets), lam)

    def _values(self, batch: RolloutBatch) -> Tensor:
        """The critic's values [B,T], 0 where masked."""
        values = masked(wide(token_column(batch, "values", torch.nan)), batch.response_mask)
        bad = (~torch.isfinite(values.sum(1))).nonzero()  # one number per row to look at: not every value
        if len(bad):
            raise DataError(f"advantage sao: the critic's value at a model token of row {int(bad[0, 0])} is not finite")
        return values

    def _lambda(self, n: Tensor) -> Tensor:
        """lam [B] of rows with n [B] model tokens; 0 for an empty one."""
        if self.actor_lambda is not None:
            return torch.full(n.shape, self.actor_lambda, dtype=torch.float64, device=n.device)
        return (1 - 1 / (self.lambda_scale * n.double().clamp(min=1))).clamp(min=0) * (n > 0)

    def _rewards(self, batch: RolloutBatch, packing: Packing) -> Tensor:
        """rho [B,T] along the model tokens of each row."""
        if batch.has("token_rewards"):
            return packing.pack(wide(batch.token_rewards))
        rewards = wide(batch.rewards)
        earned = masked(rewards, counted(rewards, batch.lengths > 0))
        at_last = (batch.lengths - 1).clamp(min=0)[:, None]
        return rewards.new_zeros(packing.mask.shape).scatter_(1, at_last, earned[:, None])
