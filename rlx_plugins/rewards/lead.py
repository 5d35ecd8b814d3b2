"""LEAD: efficiency relative to the length of the group's own correct answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ..core.batch import RolloutBatch
from ..core.errors import ConfigError
from ..core.kinds import Columns, Reward
from ..core.params import param
from ..core.registry import register
from ..core.terms import masked
from ._correctness import correctness


@register("reward", "lead")
@dataclass
class LEAD(Reward):
    """Adds an efficiency component next to correctness: how close a response's length is to its prompt's target length.

    The target is the mean length of the group's own correct answers, recomputed every step; being too short is punished
    like being too long, so that over-compression does not pay.

    target_g = clip(mean length of the correct rows, min_target, max_target), max_target without any;
    efficiency_i = max(-1, 1 - |n_i - target| / target)   (mode max_sym).
    With x = 1 - n/target: upper_only: max(-1, min(0, x)); max_asym: max(0, x) for a correct row of at least short_guard
    tokens (0 below), max(-1, min(0, x)) for a wrong one.

    Reads correct [B] where the batch has it, else rewards (right = above success_threshold), group [B], response_mask
    [B,T]. Returns reward_components [B,2] named ("correct", "efficiency"), in {0,1} and [-1,1], in place of those the
    batch had, NaN for rows without a reward; target_length [B] in tokens. They are mixed by advantage=lead, or another
    advantage of several components; `sum_weights` also sums them into rewards (the paper's static ablation), for one
    that reads those.
    """

    paper = "LEAD: Length-Efficient Adaptive and Dynamic Reasoning for Large Language Models, arXiv 2605.09806"
    provides = frozenset({"reward_components", "component_names", "target_length"})
    scope = "group"

    mode: Literal["max_sym", "max_asym", "upper_only"] = param("max_sym", doc="paper and launch script")
    aggregator: Literal["mean_correct", "min_correct", "median_correct", "mean_all"] = param(
        "mean_correct", doc="which lengths make the target; code"
    )
    min_target: float = param(1000, gt=0, doc="tokens; code's l_min")
    max_target: float = param(8000, gt=0, doc="tokens; code's l_max")
    short_guard: float = param(500, ge=0, doc="tokens below which max_asym rewards no correct answer; code")
    success_threshold: float = param(0.5, doc="right = above it, in a batch without the column correct")
    sum_weights: tuple[float, float] | None = param(None, doc="also rewards = w_c correct + w_e efficiency; ablation")

    @property
    def shapes(self) -> frozenset[str]:
        return frozenset({"reward_components"} if self.sum_weights is None else {"reward_components", "rewards"})

    def check(self) -> None:
        if self.min_target > self.max_target:
            raise ConfigError(f"reward lead.min_target: {self.min_target:g} exceeds max_target {self.max_target:g}")

    def __call__(self, batch: RolloutBatch) -> Columns:
        correct = correctness(self, batch)
        right = correct > self.success_threshold
        length = batch.lengths.to(correct.dtype)
        target = batch.groups.spread(self._target(batch, length, right))
        efficiency = self._efficiency(length, target, right)
        components = torch.stack([right.to(efficiency.dtype), efficiency], dim=1)
        unscorable = torch.isnan(batch.rewards)
        components = torch.where(unscorable[:, None], torch.full_like(components, torch.nan), components)
        columns = {
            "reward_components": components,
            "component_names": ("correct", "efficiency"),
            "target_length": target,
        }
        if self.sum_weights is not None:
            columns["rewards"] = components @ components.new_tensor(self.sum_weights)
        return columns

    def _target(self, batch: RolloutBatch, length: Tensor, right: Tensor) -> Tensor:
        groups = batch.groups
        pool = ~torch.isnan(batch.rewards) if self.aggregator == "mean_all" else right
        statistic = {"min_correct": groups.min, "median_correct": groups.median}.get(self.aggregator, groups.mean)
        some = groups.count(length, pool) > 0
        value = masked(statistic(length, pool), some).clamp(max=self.max_target).clamp(min=self.min_target)
        return torch.where(some, value, torch.full_like(value, self.max_target))

    def _efficiency(self, length: Tensor, target: Tensor, right: Tensor) -> Tensor:
        if self.mode == "max_sym":
            return (1 - (length - target).abs() / target).clamp(min=-1)
        short = 1 - length / target
        over = short.clamp(min=-1, max=0)
        if self.mode == "upper_only":
            return over
        return torch.where(right, masked(short.clamp(min=0), length >= self.short_guard), over)
