"""GAPO: the median of the group's densest reward interval as the baseline."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ..core.batch import RolloutBatch
from ..core.kinds import Advantage, Columns
from ..core.params import param
from ..core.registry import register
from ..core.segments import Segments, counted, wide
from ..core.terms import masked


@register("advantage", "gapo_snr")
@dataclass
class GAPO(Advantage):
    """Measures rewards from the tightest cluster of the group, so that a few outliers don't shift the baseline.

    The cluster is the shortest interval of the group's sorted rewards that holds `share` of them (the one of the lowest
    rewards on a tie), the baseline Q its median, and the spread is taken around Q over all rewards of the group.

    m = ceil(share n),  s* = argmin_s x_(s+m-1) - x_(s),  Q = median(x_(s*) .. x_(s*+m-1)),
    s_Q = sqrt(sum_i (r_i - Q)^2 / (n - 1)),  A_i = (r_i - Q) / (s_Q + eps).

    Reads rewards [B], group [B], response_mask [B,T]; returns advantages [B,T], 0 where masked and for unscorable rows
    (NaN reward), which enter no statistic, and `baseline` [B], the Q of each row's group. Made for continuous rewards:
    with binary ones the majority has advantage 0.

    A group of one has advantage 0; singleton="raw" gives the released code's r / (1 + eps). The share is rounded up
    with a tolerance of 1e-9, without which some shares would take one reward more than they say.
    """

    paper = "GAPO: Robust Advantage Estimation for Real-World Code LLMs, arXiv 2510.21830"
    provides = frozenset({"baseline"})

    share: float = param(0.5, gt=0, le=1, doc="share of the group in the interval; the code's find_target_fraction")
    center: Literal["median", "mean"] = param("median", doc="of the interval; option of the released code")
    normalize: bool = param(True, doc="divide by the spread around the baseline; verl's norm_adv_by_std_in_grpo")
    eps: float = param(1e-6, gt=0, doc="added to the spread; released code")
    singleton: Literal["zero", "raw"] = param("zero", doc="advantage of a group of one: 0, or its raw reward (code)")

    def __call__(self, batch: RolloutBatch) -> Columns:
        rewards, groups = wide(batch.rewards), batch.groups
        scorable = counted(rewards)
        n = groups.sum(scorable.long())
        center = interval_center(groups, rewards, self.share, self.center)
        centred = masked(rewards - groups.spread(center), scorable)
        spread = (groups.sum(centred.square()) / (n - 1).clamp(min=1)).sqrt()
        if self.singleton == "raw":
            alone = n == 1
            center = torch.where(alone, torch.zeros_like(center), center)
            spread = torch.where(alone, torch.ones_like(spread), spread)
            centred = torch.where(groups.spread(alone) & scorable, rewards, centred)
        advantages = centred / (groups.spread(spread) + self.eps) if self.normalize else centred
        return {"advantages": batch.spread(advantages), "baseline": groups.spread(center)}


def interval_center(groups: Segments, x: Tensor, share: float, center: str = "median") -> Tensor:
    """[G] median (or mean) of the shortest interval that holds `share` of each group's values; 0 for an empty group.

    x [B]; entries that are not finite are left out. Of several shortest intervals the one of the lowest values counts.
    """
    ok = counted(x)
    n = groups.sum(ok.long())
    held = ((share * n.to(torch.float64)) - 1e-9).ceil().long().clamp(min=1)
    order = groups.order(x)
    row = torch.arange(len(x), device=x.device)
    ordered = masked(x[order], ok[order])
    group = groups.index[order]
    place = row - groups.starts[group]
    last = row + held[group] - 1
    fits = place + held[group] <= n[group]
    width = ordered[last.clamp(max=len(x) - 1)] - ordered
    sorted_groups = Segments(group)
    shortest = sorted_groups.min(width, fits)
    first = sorted_groups.min(place.to(torch.float64), fits & (width == shortest[group]))
    start = groups.starts + masked(first, n > 0).long()
    if center == "mean":
        inside = (row >= start[group]) & (row < (start + held)[group])
        return sorted_groups.mean(ordered, inside)
    end = len(x) - 1
    low, high = (start + (held - 1) // 2).clamp(max=end), (start + held // 2).clamp(max=end)
    return masked((ordered[low] + ordered[high]) / 2, n > 0)
