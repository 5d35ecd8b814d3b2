"""Dr. GRPO: the distance from the group mean, without dividing by the group's spread."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ..core.batch import RolloutBatch
from ..core.kinds import Advantage, Columns
from ..core.params import param
from ..core.registry import register
from ..core.segments import counted
from ..core.terms import masked
from ._group_baseline import SINGLETON, group_baseline


@register("advantage", "dr_grpo")
@dataclass
class DrGRPO(Advantage):
    """Every token of a rollout gets its reward's distance from the group mean.

    Dividing by the group's standard deviation would give prompts that are almost always or almost never solved more
    weight than the others; the paper's other half, no division by a response's own length, is an aggregation rule.

    A_i = r_i - mean_g.

    Reads rewards [B], group [B], response_mask [B,T]; returns advantages [B,T], 0 where masked and for unscorable rows
    (NaN reward), which enter no mean. `host="verl"` keeps verl's raw reward in a group of one
    (`norm_adv_by_std_in_grpo=False`), `host="trl"` is TRL's `scale_rewards="none"`, the same as the default.
    """

    paper = "Understanding R1-Zero-Like Training: A Critical Perspective, arXiv 2503.20783"

    singleton: Literal["zero", "raw"] | None = param(None, doc="advantage of a group of one: 0, or its raw reward")
    host: Literal["verl", "trl"] | None = param(None, doc="preset for singleton")

    def __call__(self, batch: RolloutBatch) -> Columns:
        rewards = batch.rewards
        mean, _ = group_baseline(batch.groups, rewards, self.singleton or SINGLETON[self.host])
        return {"advantages": batch.spread(masked(rewards - mean, counted(rewards)))}
