"""RLOO: each reward against the mean reward of the other answers to its prompt."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ..core.batch import RolloutBatch
from ..core.errors import ConfigError
from ..core.kinds import Advantage, Columns
from ..core.params import param
from ..core.registry import register
from ..core.segments import counted, overall_mean_std, wide
from ..core.terms import masked
from ._group_baseline import SINGLETON, group_baseline


@register("advantage", "rloo")
@dataclass
class RLOO(Advantage):
    """Subtracts from each reward the mean reward of the other answers of its group: an unbiased baseline, no scaling.

    Optionally the reward is clipped and pays for its distance from the reference policy first, and the advantages are
    normalised over the batch last.

    r_i <- clip(r_i) - kl_coef * sum_t (logp_old - logp_ref),   A_i = r_i - mean_{j != i} r_j = n/(n-1) (r_i - mean_g).

    Reads rewards [B], group [B], response_mask [B,T], with `kl_coef` also logp_old and logp_ref [B,T] (nats); returns
    advantages [B,T], 0 where masked and for unscorable rows (NaN reward), which enter no mean.

    `host="verl"` keeps verl's raw reward in a group of one. `host="trl"` leaves groups of one out of the normalisation
    as TRL's RLOOTrainer does, where they would otherwise enter it with their 0. TRL's defaults beyond that are
    kl_coef=0.05.
    """

    paper = (
        "Back to Basics: Revisiting REINFORCE Style Optimization for Learning from Human Feedback in LLMs, "
        "arXiv 2402.14740"
    )

    normalize: bool = param(False, doc="subtract the batch's mean advantage and divide by its std; TRL")
    eps: float = param(1e-4, gt=0, doc="added to the batch's std; TRL")
    reward_clip: tuple[float, float] | None = param(None, doc="(lowest, highest) reward; TRL's reward_clip_range")
    kl_coef: float = param(0.0, ge=0, doc="weight of the sequence KL to the reference in the reward; TRL 0.05")
    singleton: Literal["zero", "raw"] | None = param(None, doc="advantage of a group of one: 0, or its raw reward")
    host: Literal["verl", "trl"] | None = param(None, doc="preset for singleton and for who enters the normalisation")

    def check(self) -> None:
        if self.reward_clip is not None and self.reward_clip[0] > self.reward_clip[1]:
            raise ConfigError(f"advantage rloo.reward_clip: (lowest, highest), got {self.reward_clip}")

    @property
    def scope(self) -> str:  # type: ignore[override]
        return "batch" if self.normalize else "group"

    @property
    def requires(self) -> frozenset[str]:
        return frozenset({"logp_old", "logp_ref"}) if self.kl_coef else frozenset()

    def __call__(self, batch: RolloutBatch) -> Columns:
        rewards, groups = self._penalised(batch), batch.groups
        scorable = counted(rewards)
        mean, _ = group_baseline(groups, rewards, self.singleton or SINGLETON[self.host])
        n = groups.spread(groups.count(rewards))
        advantages = (rewards - mean) * n / (n - 1).clamp(min=1)
        if self.normalize:
            where = scorable & (n > 1) if self.host == "trl" else scorable
            center, std = overall_mean_std(advantages, where)
            advantages = masked((advantages - center) / (std + self.eps), where)
        return {"advantages": batch.spread(masked(advantages, scorable))}

    def _penalised(self, batch: RolloutBatch) -> Tensor:
        rewards = wide(batch.rewards)
        if self.reward_clip is not None:
            rewards = torch.where(counted(rewards), rewards.clamp(*self.reward_clip), rewards)
        if self.kl_coef:
            kl = masked(wide(batch.logp_old) - wide(batch.logp_ref), batch.response_mask).sum(1)
            rewards = rewards - self.kl_coef * kl.to(rewards.dtype)
        return rewards
