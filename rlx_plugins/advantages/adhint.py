"""ADHint: hinted and unhinted rollouts normalised apart, and weighed by how much the hint did."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ..core.batch import RolloutBatch
from ..core.kinds import Advantage, Columns
from ..core.params import param
from ..core.registry import register
from ..core.segments import Segments, counted, wide, zscore
from ..core.terms import masked


@register("advantage", "adhint")
@dataclass
class ADHint(Advantage):
    """Normalises the rollouts of a prompt with and without a hint separately, since they solve tasks of different
    difficulty. The gap between their success rates then promotes a success without help, discounts one with help, and
    punishes a failure despite help.

    D = 1 - mean clip(r / max_reward, 0, 1) of each part, gap = clip(D_plain - D_hinted, 0, 1), x = gap_weight gap;
    A = a (1 + x) for a plain success (a > 0), a (1 - x) for a hinted one, a (1 + x) for a hinted failure (a < 0),
    a otherwise; a = (r - mean) / (std + eps) over the part (pool="separate") or over the whole group ("merged").

    Reads rewards [B] (NaN = unscorable), helped [B] bool, group [B], response_mask [B,T]; returns advantages [B,T],
    0 where masked and for unscorable rows, `difficulty_gap` [B] of each row's group and `difficulty_weight` [B]. A part
    of fewer than two scorable rows has advantage 0; without one of the parts the gap is 0, and this is GRPO.

    That the parts are not pooled and that relative difficulty weighs them is the paper's; the formula is reconstructed.
    """

    paper = "ADHint: Adaptive Hints with Difficulty Priors for Reinforcement Learning, arXiv 2512.13095"
    requires = frozenset({"helped"})
    provides = frozenset({"difficulty_gap", "difficulty_weight"})

    gap_weight: float = param(0.5, ge=0, le=1, doc="strength; above 1 a hinted success would be punished; ours")
    pool: Literal["separate", "merged"] = param("separate", doc="rows normalised together; paper: separate")
    max_reward: float = param(1.0, gt=0, doc="reward of a full success")
    eps: float = param(1e-6, gt=0, doc="added to the standard deviation; ours")

    def __call__(self, batch: RolloutBatch) -> Columns:
        rewards, hinted = wide(batch.rewards), batch.helped.bool()
        parts = batch.groups
        if self.pool == "separate":
            parts = Segments(2 * batch.groups.index + hinted.long())
        base = zscore(parts, rewards, self.eps)
        gap = batch.groups.spread(self.gap(batch.groups, rewards, hinted))
        x = self.gap_weight * gap
        signed = torch.where(hinted, -base.sign(), masked(torch.ones_like(base), base > 0))
        weight = 1 + x * signed
        return {
            "advantages": batch.spread(base * weight),
            "difficulty_gap": gap,
            "difficulty_weight": weight,
        }

    def gap(self, groups: Segments, rewards: Tensor, hinted: Tensor) -> Tensor:
        """[G] how much easier the hint made the prompt, in [0, 1]."""
        success = torch.where(counted(rewards), (rewards / self.max_reward).clamp(0, 1), rewards)
        plain, helped = groups.mean(success, ~hinted), groups.mean(success, hinted)
        both = (groups.count(success, ~hinted) > 0) & (groups.count(success, hinted) > 0)
        return masked((helped - plain).clamp(0, 1), both)
