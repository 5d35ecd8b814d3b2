"""GDPO: every reward component normalised inside the group before they are summed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ..core.batch import RolloutBatch
from ..core.kinds import Advantage, Columns
from ..core.params import param
from ..core.registry import register
from ..core.segments import counted, overall_mean_std
from ..core.terms import masked
from ._component_weights import Weights, component_weights, scorable_components
from ._group_baseline import EPS, SINGLETON, group_baseline
from ._whitened import whitened

WHITEN = {None: "token", "verl": "token", "trl": "sample"}
EPS_BATCH = {"token": 1e-8, "sample": 1e-4}
"""verl whitens over tokens with eps inside the root, TRL over samples with eps outside."""


@register("advantage", "gdpo")
@dataclass
class GDPO(Advantage):
    """Normalises each reward component inside its group, so that one with a small range is not drowned, then sums.

    The weighted sum is normalised over the batch.

    z_ik = (r_ik - mean_gk) / (std_gk + eps_group),   S_i = sum_k w_k z_ik,   A = S whitened over the batch's tokens
    (each token of row i carrying S_i) or samples.

    Reads reward_components [B,K], rewards [B] (NaN = unscorable), group [B], response_mask [B,T]; returns advantages
    [B,T], 0 where masked and for unscorable rows, and `summed` [B], the S_i. A NaN component is left out of that
    component's statistics and adds 0; a row with NaN only is unscorable.

    Defaults are verl's, but a component that only one row of a group has adds 0 there, and the mean over N tokens
    divides by N; `host="verl"` keeps verl's raw value and its N + 1e-8, `host="trl"` takes the constants of TRL's
    `multi_objective_aggregation="normalize_then_sum"`. Explicit values win over the preset. After the batch step a
    group without any spread has advantage -mean/std, not 0.
    """

    paper = (
        "GDPO: Group reward-Decoupled Normalization Policy Optimization for Multi-reward RL Optimization, "
        "arXiv 2601.05242"
    )
    requires = frozenset({"reward_components"})
    credits = "reward_components"
    provides = frozenset({"summed"})
    scope = "batch"

    weights: Weights = param(None, doc="by component name, or in alphabetical order of the names; 1 each (hosts)")
    eps_group: float | None = param(None, gt=0, doc="added to the group's std; 1e-6 (verl), 1e-4 (TRL)")
    whiten: Literal["token", "sample"] | None = param(None, doc="batch step over tokens (verl) or samples (TRL)")
    eps_batch: float | None = param(None, gt=0, doc="token: 1e-8 inside the root; sample: 1e-4 added to the std")
    singleton: Literal["zero", "raw"] | None = param(None, doc="z of a component's only value in a group: 0, or raw")
    host: Literal["verl", "trl"] | None = param(None, doc="preset for eps_group, whiten, eps_batch, singleton")

    def __call__(self, batch: RolloutBatch) -> Columns:
        components = scorable_components(batch)
        eps = self.eps_group if self.eps_group is not None else EPS[self.host]
        mean, std = group_baseline(batch.groups, components, self.singleton or SINGLETON[self.host])
        z = masked((components - mean) / (std + eps), counted(components))
        summed = z @ component_weights(batch, self.weights, "advantage gdpo.weights")
        scorable = counted(components).any(1)
        whiten = self.whiten or WHITEN[self.host]
        eps = self.eps_batch if self.eps_batch is not None else EPS_BATCH[whiten]
        if whiten == "token":
            lengths = masked(batch.lengths, scorable)
            advantages = whitened(summed, lengths, eps, count_eps=1e-8 if self.host == "verl" else 0.0)
        else:
            center, spread = overall_mean_std(summed, scorable)
            advantages = masked((summed - center) / (spread + eps), scorable)
        return {"advantages": batch.spread(advantages), "summed": summed}
