"""GRPO: the z-score of a rollout's reward inside its prompt group."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from ..core.batch import RolloutBatch
from ..core.kinds import Advantage, Columns
from ..core.params import param
from ..core.registry import register
from ..core.segments import counted, overall_mean_std
from ..core.terms import masked
from ._group_baseline import EPS, SINGLETON, group_baseline


@register("advantage", "grpo")
@dataclass
class GRPO(Advantage):
    """Every token of a rollout gets its reward's distance from the group mean, in units of the group's spread.

    There is no value network: the other answers to the same prompt are the baseline.

    A_i = (r_i - mean_g) / (std + eps), with the std of the group, of the whole batch, or none at all.

    Reads rewards [B], group [B], response_mask [B,T]; returns advantages [B,T], 0 where masked and for unscorable rows
    (NaN reward), which enter no statistic.

    Defaults are verl's (`algorithm.adv_estimator=grpo`), but a group of one has advantage 0; `host="verl"` keeps verl's
    raw reward there, `host="trl"` takes TRL's eps. An explicit `eps` or `singleton` wins over the preset.
    """

    paper = "DeepSeekMath: Pushing the Limits of Mathematical Reasoning in Open Language Models, arXiv 2402.03300"

    scale: Literal["group", "batch", "none"] = param("group", doc="whose standard deviation divides")
    eps: float | None = param(None, gt=0, doc="added to the standard deviation; 1e-6 (verl), 1e-4 (TRL)")
    ddof: int = param(1, ge=0, le=1, doc="1: unbiased standard deviation (both hosts)")
    singleton: Literal["zero", "raw"] | None = param(None, doc="advantage of a group of one: 0, or its raw reward")
    host: Literal["verl", "trl"] | None = param(None, doc="preset for eps and singleton")

    @property
    def scope(self) -> str:  # type: ignore[override]
        return "batch" if self.scale == "batch" else "group"

    def __call__(self, batch: RolloutBatch) -> Columns:
        rewards, groups = batch.rewards, batch.groups
        eps = self.eps if self.eps is not None else EPS[self.host]
        mean, std = group_baseline(groups, rewards, self.singleton or SINGLETON[self.host], self.ddof)
        advantages = rewards - mean
        if self.scale == "batch":
            alone = groups.spread(groups.count(rewards)) == 1
            std = torch.where(alone, std, overall_mean_std(rewards, ddof=self.ddof)[1])
        if self.scale != "none":
            advantages = advantages / (std + eps)
        return {"advantages": batch.spread(masked(advantages, counted(rewards)))}
