"""CIPO: a rollout's first choice of granularity is judged against a twin that chose otherwise."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ..core.batch import RolloutBatch
from ..core.errors import ConfigError
from ..core.kinds import Columns
from ..core.params import param
from ..core.registry import register
from ..core.segments import wide
from ..core.terms import masked
from ._base import Base, OnBase
from ._token_column import token_column


@register("advantage", "cipo")
@dataclass
class CIPO(OnBase):
    """An agent chooses between atomic tools and composite skills. For each rollout one counterfactual twin makes the
    other choice at the first decision point, and the difference of the outcomes rewards or punishes that choice.

    d_i = clip(r_i - twin_i, +-difference_bound), 0 where either is missing;
    apply_to="all": the group z-score of r_i + twin_weight d_i on every token of the row;
    apply_to="decision": the z-score of r_i, plus twin_weight d_i on the tokens of the decision.

    Reads rewards [B] (NaN = unscorable), twin_rewards [B] (NaN = no eligible decision, or the twin failed), group [B],
    response_mask [B,T], for "decision" decision_mask [B,T], and what `base` reads; returns advantages [B,T], 0 where
    masked and for unscorable rows, and `paired_difference` [B], d. The agent loop runs the twins and returns their
    outcomes as an extra field of the row; twins are not trained on.

    Formula, weight and bound are reconstructed from the abstract; its "supplementary reward" fits "all". A group of one
    has advantage 0; base={"name": "grpo", "singleton": "raw"} keeps its raw reward.
    """

    paper = "Counterfactual Imagination Policy Optimization, arXiv 2610.04991"
    makes = frozenset({"paired_difference"})

    twin_weight: float = param(0.5, ge=0, doc="weight of the paired difference; reconstructed")
    difference_bound: float = param(1.0, gt=0, doc="largest |d|; reconstructed")
    apply_to: Literal["all", "decision"] = param("all", doc="tokens that get the difference; reconstructed")
    base: Base = param("grpo", doc="estimator underneath; reconstructed")

    @property
    def reads(self) -> frozenset[str]:
        return frozenset({"twin_rewards"} | ({"decision_mask"} if self.apply_to == "decision" else set()))

    def check(self) -> None:
        super().check()
        if self.apply_to == "all" and self.credits != "rewards":
            raise ConfigError(
                "advantage cipo.base: apply_to='all' supplements rewards, but"
                f" {self.estimator.name} reads {self.credits}"
            )

    def __call__(self, batch: RolloutBatch) -> Columns:
        difference = self.difference(batch)
        supplement = self.twin_weight * difference
        if self.apply_to == "all":
            columns = dict(self.estimator(batch.with_columns(rewards=wide(batch.rewards) + supplement)))
        else:
            columns = dict(self.estimator(batch))
            decision = token_column(batch, "decision_mask").bool() & batch.response_mask
            columns["advantages"] = columns["advantages"] + masked(supplement[:, None], decision)
        return columns | {"paired_difference": difference}

    def difference(self, batch: RolloutBatch) -> Tensor:
        """d [B]."""
        rewards = wide(batch.rewards)
        apart = rewards - batch.twin_rewards.to(rewards.dtype)
        both = torch.isfinite(rewards) & torch.isfinite(batch.twin_rewards)
        return masked(apart, both).clamp(-self.difference_bound, self.difference_bound)
