"""GRPO: the z-score of a rollout's reward inside its prompt group."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from ..core.batch import RolloutBatch
from ..core.kinds import Advantage, Columns
from ..core.params import param
from ..core.registry import register
from ..core.segments import counted

HOST_EPS = {"verl": 1e-6, "trl": 1e-4}
"""What each host adds to a standard deviation before dividing by it."""


@register("advantage", "grpo")
@dataclass
class GRPO(Advantage):
    """Every token of a rollout gets its reward's distance from the group mean, in units of the group's spread.

    There is no value network: the other answers to the same prompt are the baseline.

    A_i = (r_i - mean_g) / (std + eps), with the std of the group, of the whole batch, or none at all.

    Reads rewards [B], group [B], response_mask [B,T]; returns advantages [B,T] in the dtype of the rewards, 0 where
    masked and for unscorable rows (NaN reward), which enter no statistic.

    Defaults are verl's (`algorithm.adv_estimator=grpo`), but a group of one has advantage 0; `host="verl"` keeps verl's
    raw reward there, `host="trl"` takes TRL's eps. An explicit `eps` or `singleton` wins over the preset.
    """

    paper = "DeepSeekMath: Pushing the Limits of Mathematical Reasoning in Open Language Models, arXiv 2402.03300"

    scale: Literal["group", "batch", "none"] = param("group", doc="whose standard deviation divides")
    eps: float | None = param(None, gt=0, doc="added to the standard deviation; 1e-6 (verl), 1e-4 (TRL)")
    ddof: int = param(1, ge=0, le=1, doc="1: unbiased standard deviation (both hosts)")
    singleton: Literal["zero", "raw"] | None = param(None, doc="advantage of a group of one: 0, or the reward itself")
    host: Literal["verl", "trl"] | None = param(None, doc="preset for eps and singleton")

    def __call__(self, batch: RolloutBatch) -> Columns:
        rewards, groups = batch.rewards, batch.groups
        eps = self.eps if self.eps is not None else HOST_EPS[self.host or "verl"]
        mean, std, n = groups.mean_std(rewards, ddof=self.ddof)
        alone = groups.spread(n) <= 1
        centred = rewards - groups.spread(mean)
        if self.scale == "group":
            advantages = centred / (groups.spread(std) + eps)
        elif self.scale == "batch":
            advantages = centred / (rewards[counted(rewards)].std(correction=self.ddof) + eps)
        else:
            advantages = centred
        singleton = self.singleton or ("raw" if self.host == "verl" else "zero")
        raw = rewards if self.scale == "none" else rewards / (1 + eps)
        advantages = torch.where(alone, raw if singleton == "raw" else torch.zeros_like(rewards), advantages)
        return {"advantages": batch.spread(torch.where(counted(rewards), advantages, torch.zeros_like(advantages)))}
