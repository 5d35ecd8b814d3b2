"""CADENCE's CCD: partial credit for wrong numbers that are near the right one."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..core.batch import RolloutBatch
from ..core.kinds import Columns, Reward
from ..core.params import param
from ..core.registry import register
from ..core.segments import counted
from ..core.terms import masked
from ._correctness import correctness


@register("reward", "cadence")
@dataclass
class CADENCE(Reward):
    """Gives a wrong answer a reward that grows as its number approaches the target, so that near misses carry signal;
    a correct answer always scores highest.

    err = |predicted - target| / max(|target|, floor)
    reward = 1 for a correct answer, max_partial max(0, 1 - err / tolerance) for a wrong one

    Reads correct [B] where the batch has it, else rewards (right = above success_threshold), and the columns predicted
    and target [B] (NaN or infinite = no number: reward 0), which the user's reward code and dataset supply, parsed the
    way the verifier parses. Returns rewards [B], NaN where correctness is; `correct` [B], the verifier's judgement,
    which advantage=cadence reads; nonzero_share, a number (the paper reports 38 % rising to 55 %).

    All three constants are reconstructed.
    """

    paper = "CADENCE: Closing the Reasoning Gap for Tiny Language Models on Edge Hardware, arXiv 2607.16955"
    requires = frozenset({"predicted", "target"})
    provides = frozenset({"correct"})

    max_partial: float = param(0.5, gt=0, lt=1, doc="reward of a wrong answer at the target; reconstructed")
    tolerance: float = param(0.5, gt=0, doc="relative error from which a wrong answer gets nothing; reconstructed")
    floor: float = param(1.0, gt=0, doc="smallest |target| errors are relative to; reconstructed")
    success_threshold: float = param(0.5, doc="right = above it, in a batch without the column correct")

    def __call__(self, batch: RolloutBatch) -> Columns:
        correct = correctness(self, batch)
        right = correct > self.success_threshold
        predicted, target = batch.predicted.to(correct.dtype), batch.target.to(correct.dtype)
        known = torch.isfinite(predicted) & torch.isfinite(target)
        error = (predicted - target).abs() / target.abs().clamp(min=self.floor)
        partial = masked(self.max_partial * (1 - error / self.tolerance).clamp(min=0), known)
        rewards = torch.where(right, torch.ones_like(partial), partial)
        judged = counted(correct)
        return {
            "rewards": torch.where(judged, rewards, torch.full_like(rewards, torch.nan)),
            "correct": correct,
            "nonzero_share": masked(rewards != 0, judged).sum().to(rewards.dtype) / judged.sum().clamp(min=1),
        }
