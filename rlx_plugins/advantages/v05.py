"""V_0.5: a value prior as baseline, corrected towards the rollouts' mean as far as they contradict it."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from ..core.batch import RolloutBatch
from ..core.errors import ConfigError
from ..core.kinds import Advantage, Columns
from ..core.params import param
from ..core.registry import register
from ..core.segments import counted, overall_mean_std, wide
from ..core.terms import masked

EPSILONS = 64
"""A spread of this many machine epsilons, relative to the rewards, is rounding: nothing is divided by it."""


class Baseline(NamedTuple):
    """Per row [B], equal within a group: the baseline, and the weight on the group's mean in it."""

    baseline: Tensor
    weight: Tensor


@register("advantage", "v05")
@dataclass
class V05(Advantage):
    """Combines a pretrained value model's guess of a prompt's expected reward with the mean reward of its few rollouts:
    the more the mean contradicts the guess beyond sampling noise, the more it counts (positive-part James-Stein).

    n scorable rows with mean m, guess V clipped to [reward_min, reward_max], h half that interval's width:
    s2 = h^2 / n;   D2 = max(0, (m - V)^2 - s2);   w = D2 / (D2 + s2);   b = w m + (1 - w) V;   A_i = r_i - b.

    Reads rewards [B] (NaN = unscorable), group [B], response_mask [B,T] and the column `prior` [B] (V, one value per
    group on the scale of the rewards; NaN: none, and b = m). Returns advantages [B,T], 0 where masked and for
    unscorable rows; baseline and weight [B]. Warns of rewards outside [reward_min, reward_max], for which s2 does not
    bound the variance.

    There is no division by the group's spread: a group of equal rewards, or of one, keeps the advantage its prior gives
    it, by design. scale="batch" (reconstructed) divides by the std of all advantages of the batch; with fewer than two
    of them, or where they are equal up to rounding, it leaves them.
    """

    paper = "V_0.5: Generalist Value Model as a Prior for Sparse RL Rollouts, arXiv 2603.10848"
    provides = frozenset({"baseline", "weight"})

    prior: str = param("value_prior", doc="column with the value model's guess")
    reward_min: float = param(-1.0, doc="lowest reward; the paper's -1")
    reward_max: float = param(1.0, doc="highest reward; the paper's +1")
    scale: Literal["none", "batch"] = param("none", doc="whose standard deviation divides; batch: reconstructed")
    eps: float = param(1e-6, gt=0, doc="added to the standard deviation; reconstructed")

    def check(self) -> None:
        if self.reward_min >= self.reward_max:
            raise ConfigError(
                f"advantage v05.reward_min: must be below reward_max ({self.reward_max:g}), got {self.reward_min:g}"
            )

    @property
    def scope(self) -> str:  # type: ignore[override]
        return "batch" if self.scale == "batch" else "group"

    @property
    def requires(self) -> frozenset[str]:
        return frozenset({self.prior})

    def __call__(self, batch: RolloutBatch) -> Columns:
        rewards = wide(batch.rewards)
        scorable = counted(rewards)
        self._warn_outside(rewards)
        found = self.fused_baseline(batch)
        advantages = masked(rewards - found.baseline, scorable)
        if self.scale == "batch":
            std = overall_mean_std(advantages, scorable)[1]
            rounding = EPSILONS * torch.finfo(std.dtype).eps * masked(rewards.abs() + advantages.abs(), scorable).amax()
            advantages = torch.where(std > rounding, advantages / (std + self.eps), advantages)
        return {"advantages": batch.spread(advantages), **found._asdict()}

    def fused_baseline(self, batch: RolloutBatch) -> Baseline:
        """b and w."""
        rewards, groups = wide(batch.rewards), batch.groups
        given = torch.as_tensor(batch[self.prior], device=batch.device).to(rewards.dtype)
        mean, n = groups.mean(rewards), groups.count(rewards)
        prior = groups.mean(given).clamp(self.reward_min, self.reward_max)
        noise = ((self.reward_max - self.reward_min) / 2) ** 2 / n.clamp(min=1)
        error = ((mean - prior).square() - noise).clamp(min=0)
        weight = torch.where(groups.count(given) > 0, error / (error + noise), torch.ones_like(error))
        weight = masked(weight, n > 0)
        return Baseline(groups.spread(weight * mean + (1 - weight) * prior), groups.spread(weight))

    def _warn_outside(self, rewards: Tensor) -> None:
        if bool(((rewards < self.reward_min) | (rewards > self.reward_max)).any()):  # False for NaN
            warnings.warn(
                f"advantage v05: rewards outside [{self.reward_min:g}, {self.reward_max:g}]; the variance bound does"
                " not hold for them, set reward_min and reward_max",
                stacklevel=3,
            )
