"""REINFORCE++: token returns normalised over the whole batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ..core.batch import RolloutBatch
from ..core.kinds import Advantage, Columns
from ..core.params import param
from ..core.registry import register
from ..core.segments import counted, wide
from ..core.terms import masked
from ._discounted import discounted_returns
from ._group_baseline import SINGLETON, group_baseline
from ._whitened import whitened


@register("advantage", "reinforce_pp")
@dataclass
class ReinforcePP(Advantage):
    """Discounted returns of each token, whitened over all tokens of the batch instead of inside a prompt group.

    With baseline="group" (REINFORCE++-baseline) the return of every token is its rollout's reward minus the group's
    mean reward.

    ret_t = r_t + discount * ret_{t+1} over the model tokens (others neither reward nor discount), or r_i - mean_g;
    A = (ret - mean) / sqrt(var + eps), mean and unbiased variance over all model tokens of the batch.

    Reads rewards [B], placed on the last model token of the row, or, where the batch has it, token_rewards [B,T] in
    their place; group [B] for the baseline; response_mask [B,T]. Returns advantages and returns [B,T], 0 where masked
    and for unscorable rows (NaN reward), which enter no statistic.

    A group of one has baseline-subtracted reward 0 before whitening; `host="verl"` keeps its raw reward. A batch with
    fewer than two tokens gives zeros, where verl raises.
    """

    paper = "REINFORCE++: A Simple and Efficient Approach for Aligning Large Language Models, arXiv 2501.03262"
    provides = frozenset({"returns"})
    scope = "batch"

    discount: float = param(1.0, ge=0, le=1, doc="per model token; verl's algorithm.gamma")
    baseline: Literal["none", "group"] = param("none", doc="subtract the group's mean reward first; verl's names")
    eps: float = param(1e-8, gt=0, doc="added to the variance; verl")
    singleton: Literal["zero", "raw"] | None = param(
        None, doc="baseline-subtracted reward of a group of one: 0, or raw"
    )
    host: Literal["verl"] | None = param(None, doc="preset for singleton")

    def __call__(self, batch: RolloutBatch) -> Columns:
        rewards = self._row_rewards(batch)
        scorable = counted(rewards)
        if self.baseline == "group":
            mean, _ = group_baseline(batch.groups, rewards, self.singleton or SINGLETON[self.host])
            return self._same_in_every_token(batch, rewards - mean, scorable)
        if not batch.has("token_rewards") and self.discount == 1:
            return self._same_in_every_token(batch, rewards, scorable)
        mask = batch.response_mask & scorable[:, None]
        if batch.has("token_rewards"):
            returns = discounted_returns(wide(batch.token_rewards), mask, self.discount)
        else:
            left = batch.lengths[:, None] - mask.cumsum(1, dtype=torch.int32)
            returns = masked(rewards[:, None] * self.discount ** left.to(rewards.dtype), mask)
        return {"advantages": whitened(returns, mask, self.eps), "returns": returns}

    def _same_in_every_token(self, batch: RolloutBatch, returns: Tensor, scorable: Tensor) -> Columns:
        advantages = whitened(returns, masked(batch.lengths, scorable), self.eps)
        return {"advantages": batch.spread(advantages), "returns": batch.spread(masked(returns, scorable))}

    def _row_rewards(self, batch: RolloutBatch) -> Tensor:
        """[B] reward of the whole row, NaN where it could not be scored: a NaN reward, or one on a model token."""
        if not batch.has("token_rewards"):
            return wide(batch.rewards)
        rewards = wide(batch.token_rewards)
        known = torch.isfinite(rewards)
        bad = (~known & batch.response_mask).any(1) | ~torch.isfinite(batch.rewards)
        total = masked(rewards, known).sum(1)
        return torch.where(bad, torch.full_like(total, torch.nan), total)
