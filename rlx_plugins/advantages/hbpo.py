"""HBPO: how a token budget's rows do against what the budget pays, and how each row does in its group."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..core.batch import RolloutBatch
from ..core.kinds import Advantage, Columns
from ..core.params import param
from ..core.registry import register
from ..core.segments import Segments, counted, wide, zscore
from ..core.terms import masked


@register("advantage", "hbpo")
@dataclass
class HBPO(Advantage):
    """Adds two comparisons: the rows of one token budget against what that budget could have paid, which keeps every
    budget level useful, and each row against the whole group of its prompt, which lets the levels compete.

    intra_i = mean of (reward - baseline) over the rows of i's group and budget (at most 0 under reward=hbpo),
    inter_i = (r_i - mean_g) / (std_g + eps), 0 in a group of one,   A_i = intra_i + inter_i.

    Reads rewards [B] (NaN = unscorable), budget [B] (tokens; equal values are one level), budget_baseline [B] (what the
    budget pays a correct answer that keeps to it; reward=hbpo makes it), group [B], response_mask [B,T]; returns
    advantages [B,T], 0 where masked and for unscorable rows, which enter no mean; `inter_budget` and `intra_budget`
    [B]. A group of equal rewards still has intra: where all answers are wrong it is -baseline, a common push that is
    stronger for small budgets. std convention and eps are ours.
    """

    paper = "Hierarchical Budget Policy Optimization for Adaptive Reasoning, arXiv 2507.15844"
    provides = frozenset({"inter_budget", "intra_budget"})

    use_intra: bool = param(True, doc="False: only the comparison within the group, which is GRPO; ablation")
    eps: float = param(1e-6, gt=0, doc="added to the standard deviation; ours")

    @property
    def requires(self) -> frozenset[str]:
        return frozenset({"budget", "budget_baseline"} if self.use_intra else ())

    def __call__(self, batch: RolloutBatch) -> Columns:
        rewards = wide(batch.rewards)
        inter = zscore(batch.groups, rewards, self.eps)
        intra = self.intra(batch, rewards) if self.use_intra else torch.zeros_like(inter)
        return {"advantages": batch.spread(inter + intra), "inter_budget": inter, "intra_budget": intra}

    def intra(self, batch: RolloutBatch, rewards: Tensor) -> Tensor:
        """[B] what the row's level of its group earned beyond its baseline, on average."""
        _, level = torch.unique(batch.budget, return_inverse=True)
        levels = Segments(batch.groups.index * batch.size + level)
        scorable = counted(rewards)
        earned = levels.mean(rewards, scorable) - levels.mean(batch.budget_baseline.to(rewards.dtype), scorable)
        return masked(levels.spread(earned), scorable)
