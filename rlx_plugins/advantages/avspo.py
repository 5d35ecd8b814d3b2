"""AVSPO: virtual rewards for groups that all got the same, when too many groups did."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..core.batch import RolloutBatch
from ..core.kinds import Advantage, Columns
from ..core.params import param
from ..core.registry import register
from ..core.segments import counted, overall_mean_std, wide
from ..core.state import state
from ..core.terms import masked


@register("advantage", "avspo")
@dataclass
class AVSPO(Advantage):
    """Pads collapsed groups (all rewards equal) with virtual rewards so that they keep a small common advantage.

    It does so only while the share of such groups, the advantage collapse rate (ACR), is above a threshold that adapts
    over steps. Virtual rewards enter a group's mean and standard deviation and nothing else.

    tau <- tau + eta sign(J - J_prev) (ACR - tau) with J the batch's mean reward; if ACR > tau, a collapsed group of n
    rollouts with highest reward r gets K = max(1, min(n, ceil(n ACR^alpha))) virtual rewards, k = 1..K:
    r (1 - k/(K+1)) if r > 0, else r_anchor (K-k+1)/K. A_i = (r_i - mean) / (std + eps), mean and population std over
    real and virtual rewards.

    Reads rewards [B], group [B], response_mask [B,T]; returns advantages [B,T], 0 where masked and for unscorable rows
    (NaN reward), which enter no statistic; `virtual_samples` [B], the K of each row's group; collapse_rate (ACR) and
    collapse_threshold (tau), numbers. State: tau and J of the step before, updated by every call.

    Reconstructed: tau moves before it is compared, and not at the first step; it is kept in [0, 1], which the rule
    alone would leave when J falls again and again. A group of one counts as collapsed, as published. Where no group is
    padded, a collapsed one has advantage exactly 0 even if its rewards differ by less than `collapse_std`. A batch
    without a scorable row leaves the state alone.
    """

    paper = "Adaptive Virtual Sample Policy Optimization (advantage collapse rate), arXiv 2605.21125"
    provides = frozenset({"virtual_samples"})
    scope = "batch"

    ladder_exponent: float = param(0.5, gt=0, doc="how the number of virtual rewards grows with ACR; paper's alpha")
    anchor_reward: float = param(0.1, gt=0, doc="highest virtual reward of a failed group; paper's r_anchor")
    initial_threshold: float = param(0.5, gt=0, lt=1, doc="ACR above which groups are padded, at first; paper's tau")
    threshold_rate: float = param(0.01, gt=0, lt=1, doc="step of the threshold's adaptation; paper's eta")
    collapse_std: float = param(1e-6, gt=0, doc="population std below which a group has collapsed; paper")
    eps: float = param(1e-8, gt=0, doc="added to the standard deviation; paper")

    threshold: float | None = state(None)
    previous_mean: float | None = state(None)

    def __call__(self, batch: RolloutBatch) -> Columns:
        rewards, groups = wide(batch.rewards), batch.groups
        scorable = counted(rewards)
        mean, std, n = groups.mean_std(rewards, ddof=0)
        collapsed = (std < self.collapse_std) & (n > 0)
        rate = int(collapsed.sum()) / max(1, int((n > 0).sum()))
        threshold = self._updated_threshold(rate, rewards)
        virtual = torch.zeros_like(n)
        if rate > threshold:
            rungs = (n.double() * rate**self.ladder_exponent - 1e-12).ceil().clamp(min=1).to(n.dtype)
            virtual = masked(rungs.minimum(n), collapsed)
        top = groups.max(rewards)
        step = torch.where(top > 0, top / (virtual + 1), self.anchor_reward / virtual.clamp(min=1))
        mean, std = _pooled(mean, std, n, step, virtual)
        live = scorable & groups.spread(~collapsed | (virtual > 0))
        advantages = (rewards - groups.spread(mean)) / (groups.spread(std) + self.eps)
        return {
            "advantages": batch.spread(masked(advantages, live)),
            "virtual_samples": groups.spread(virtual).long(),
            "collapse_rate": rate,
            "collapse_threshold": threshold,
        }

    def _updated_threshold(self, rate: float, rewards: Tensor) -> float:
        """Move the threshold by this step's collapse rate and mean reward, and remember both."""
        threshold = self.initial_threshold if self.threshold is None else self.threshold
        if bool(counted(rewards).any()):
            mean = float(overall_mean_std(rewards)[0])
            if self.previous_mean is not None:
                sign = (mean > self.previous_mean) - (mean < self.previous_mean)
                threshold += self.threshold_rate * sign * (rate - threshold)
                threshold = min(max(threshold, 0.0), 1.0)
            self.threshold, self.previous_mean = threshold, mean
        return threshold


def _pooled(mean: Tensor, std: Tensor, n: Tensor, step: Tensor, virtual: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and population std of n rewards together with the ladder step * (1, 2, .., virtual), per group [G].

    A ladder of K rungs has mean step (K+1)/2 and sum of squared deviations step^2 K (K^2-1) / 12.
    """
    total = (n + virtual).clamp(min=1)
    ladder = step * (virtual + 1) / 2
    apart = ladder - mean
    squares = n * std.square() + step.square() * virtual * (virtual.square() - 1) / 12
    squares = squares + n * virtual / total * apart.square()
    return mean + masked(virtual / total * apart, virtual > 0), (masked(squares, n > 0) / total).sqrt()
