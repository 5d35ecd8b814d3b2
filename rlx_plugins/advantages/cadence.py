"""CADENCE's LAP: the centred reward, and a bonus for correct rollouts that is larger for shorter ones."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..core.batch import RolloutBatch
from ..core.kinds import Advantage, Columns
from ..core.params import param
from ..core.registry import register
from ..core.segments import counted, wide
from ..core.terms import masked
from ..replay.cadence import SELF_DISTILLED


@register("advantage", "cadence")
@dataclass
class CADENCE(Advantage):
    """Centres the reward in its group and adds a bonus to correct rollouts, the larger the shorter they are compared
    with the group's correct ones.

    A_i = reward_coef (r_i - mean_g) + brevity_coef u_i,
    u_i = 1 + length_slope clip((L - n_i) / L, -1, 1) for a correct row of n_i tokens, L the mean length of the group's
    correct rows; 0 for a wrong one.

    Reads rewards [B] (NaN = unscorable), correct [B] where the batch has it, else rewards (right = above
    success_threshold), group [B], response_mask [B,T]; returns advantages [B,T], 0 where masked and for unscorable
    rows, `centred_reward` and `brevity` [B], u. Unscorable rows and rows without tokens enter no mean. reward=cadence
    passes on the verifier's judgement as `correct`, since its partial credit is no judgement.

    Rows of replay=cadence (column self_distilled [B] = 1, where the batch has it) have advantage 1: they are trained as
    by supervised fine-tuning.

    In the paper this joins the token advantage of the method's distillation. All three coefficients are reconstructed.
    """

    paper = "CADENCE: Closing the Reasoning Gap for Tiny Language Models on Edge Hardware, arXiv 2607.16955"
    provides = frozenset({"centred_reward", "brevity"})

    reward_coef: float = param(1.0, doc="weight of the centred reward; paper's lambda_r, reconstructed")
    brevity_coef: float = param(0.5, doc="weight of the bonus; paper's lambda_lap, reconstructed")
    length_slope: float = param(0.5, ge=0, lt=1, doc="how much length moves the bonus; paper's eta, reconstructed")
    success_threshold: float = param(0.5, doc="right = above it")

    def __call__(self, batch: RolloutBatch) -> Columns:
        rewards, groups = wide(batch.rewards), batch.groups
        pool = counted(rewards, batch.lengths > 0)
        centred = masked(rewards - groups.spread(groups.mean(rewards, pool)), pool)
        brevity = self.brevity(batch, pool)
        advantages = self.reward_coef * centred + self.brevity_coef * brevity
        if batch.has(SELF_DISTILLED):
            advantages = torch.where(batch[SELF_DISTILLED] == 1, torch.ones_like(advantages), advantages)
        return {"advantages": batch.spread(advantages), "centred_reward": centred, "brevity": brevity}

    def brevity(self, batch: RolloutBatch, pool: Tensor) -> Tensor:
        """u [B]."""
        judged = batch.correct if batch.has("correct") else batch.rewards
        right = (judged > self.success_threshold) & pool
        length = batch.lengths.to(batch.dtype)
        typical = batch.groups.spread(batch.groups.mean(length, right))
        shorter = (typical - length) / torch.where(right, typical, torch.ones_like(typical))
        return masked(1 + self.length_slope * shorter.clamp(-1, 1), right)
