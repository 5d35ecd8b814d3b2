"""DVAO: reward components weighted by their own spread in the group."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..core.batch import RolloutBatch
from ..core.errors import ConfigError
from ..core.kinds import Advantage, Columns
from ..core.params import param
from ..core.registry import register
from ..core.segments import counted
from ..core.terms import masked
from ._component_weights import Weights, component_weights, scorable_components


@register("advantage", "dvao")
@dataclass
class DVAO(Advantage):
    """Gives each component's group z-score a weight in proportion to its spread in that group.

    A component that is constant for a prompt carries no information and does not dilute the others; one that separates
    the rollouts leads. The mix is convex, so the advantage never exceeds that of plain reward summation.

    a_ik = (r_ik - mean_gk) / std_gk,   omega_gk = w_k std_gk / sum_l w_l std_gl,   A_i = sum_k omega_gk a_ik, computed
    in closed form: A_i = sum_k w_k (r_ik - mean_gk) / (sum_l w_l std_gl + eps).

    Reads reward_components [B,K], rewards [B] (NaN = unscorable), group [B], response_mask [B,T]; returns advantages
    [B,T], 0 where masked and for unscorable rows, and `dynamic_weights` [B,K], the omega of each row's group (0 where
    no component varies). A NaN component is left out of that component's statistics and adds 0; a component with at
    most `ddof` values in a group is dropped there. Raises ConfigError for negative weights or zeros only.
    """

    paper = (
        "DVAO: Dynamic Variance-adaptive Advantage Optimization for Multi-reward Reinforcement Learning, "
        "arXiv 2605.25604"
    )
    requires = frozenset({"reward_components"})
    credits = "reward_components"
    provides = frozenset({"dynamic_weights"})

    weights: Weights = param(
        None, ge=0, doc="priorities by component name, or in alphabetical order of the names; 1/K each (ours)"
    )
    eps: float = param(1e-6, gt=0, doc="added to the weighted sum of the spreads; verl's GRPO constant")
    ddof: int = param(1, ge=0, le=1, doc="1: unbiased standard deviation; verl's GRPO constant")

    def check(self) -> None:
        if self.weights is not None:
            values = self.weights.values() if isinstance(self.weights, dict) else self.weights
            if not any(w > 0 for w in values):
                raise ConfigError(f"advantage dvao.weights: at least one must be above 0, got {self.weights}")

    def __call__(self, batch: RolloutBatch) -> Columns:
        components, groups = scorable_components(batch), batch.groups
        equal = 1 / components.shape[1]
        weights = component_weights(batch, self.weights, "advantage dvao.weights", equal)
        mean, std, _ = groups.mean_std(components, ddof=self.ddof)
        total = std @ weights
        centred = masked(components - groups.spread(mean), counted(components))
        advantages = centred @ weights / (groups.spread(total) + self.eps)
        varies = total > 0
        omega = masked(weights * std / torch.where(varies, total, torch.ones_like(total))[:, None], varies[:, None])
        return {"advantages": batch.spread(advantages), "dynamic_weights": groups.spread(omega)}
