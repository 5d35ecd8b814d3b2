"""ERILS: rollouts of a stronger policy, chosen by length and normalised apart from the policy's own."""

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
from ..core.segments import Segments, counted, wide
from ..core.terms import masked

COLLAPSED = 1e-8
"""Standard deviation up to which rewards count as equal."""


@register("advantage", "erils")
@dataclass
class ERILS(Advantage):
    """Keeps those rollouts of a stronger external policy that fit the policy's generation length, and z-scores each
    source on its own, so that strong external rewards do not push every rollout of the policy below the mean.

    Length control per group: of the external rows with length <= target_length, the closest to it, then the best
    rewarded, at most max_external of them. Then per group and source, over the kept scorable rows:

        A_i = (r_i - mean) / (std + eps), times external_weight for external rows; 0 where all rewards are equal, or for
        external rows r_i - constant_baseline with homogeneous="constant".

    Reads rewards [B] (NaN = unscorable), external [B] bool, group [B], response_mask [B,T] for the lengths in tokens;
    returns advantages [B,T], 0 where masked, dropped or unscorable; `external_kept` [B] bool, False for dropped rows;
    and response_mask without the dropped rows, which so leave every statistic and every denominator.
    statistics="joint" takes one z-score over both sources, the paper's ablation that collapsed.

    Only the idea is published (an abstract); all formulas are reconstructed. External rows join the batch through a
    replay part or the user's rollout code, with their flag as a column; their logp_old comes from the training model.
    """

    paper = "ERILS: External Rollout Integration with Length Control and Source-Specific Processing, no arXiv id found"
    requires = frozenset({"external"})
    provides = frozenset({"external_kept"})

    target_length: int | None = param(None, ge=1, doc="tokens; longest external row; None: no control; paper 128..512")
    max_external: int | None = param(None, ge=0, doc="external rows kept per group; None: all that fit")
    external_weight: float = param(1.0, ge=0, doc="scale of external advantages; 0: not trained on")
    homogeneous: Literal["zero", "constant"] = param("zero", doc="external rows of equal reward: 0, or r - baseline")
    constant_baseline: float = param(0.5, doc="baseline of homogeneous='constant'")
    statistics: Literal["separate", "joint"] = param("separate", doc="rows normalised together; paper: separate")
    eps: float = param(1e-6, gt=0, doc="added to the standard deviation")
    ddof: int = param(1, ge=0, le=1, doc="1: unbiased standard deviation")

    def check(self) -> None:
        if self.max_external is not None and self.target_length is None:
            raise ConfigError("advantage erils.max_external: chooses by closeness to target_length, which is not given")

    def __call__(self, batch: RolloutBatch) -> Columns:
        rewards, external = wide(batch.rewards), batch.external.bool()
        keep = ~external | self.chosen(batch, rewards, external)
        separate = self.statistics == "separate"
        parts = Segments(2 * batch.groups.index + external.long()) if separate else batch.groups
        mean, std, n = parts.mean_std(rewards, keep, ddof=self.ddof)
        varies = parts.spread((std > COLLAPSED) & (n > 1))
        advantages = masked((rewards - parts.spread(mean)) / (parts.spread(std) + self.eps), varies)
        if separate:
            if self.homogeneous == "constant":
                imitated = rewards - self.constant_baseline
                advantages = torch.where(external & ~varies, imitated, advantages)
            advantages = torch.where(external, self.external_weight * advantages, advantages)
        return {
            "advantages": batch.spread(masked(advantages, counted(rewards, keep))),
            "external_kept": keep,
            "response_mask": batch.response_mask & keep[:, None],
        }

    def chosen(self, batch: RolloutBatch, rewards: Tensor, external: Tensor) -> Tensor:
        """[B] bool: rows that length control keeps if they are external; all of them without a target."""
        if self.target_length is None:
            return torch.ones_like(external)
        spare = self.target_length - batch.lengths
        fits = external & (spare >= 0) & counted(rewards)
        if self.max_external is None:
            return fits
        best_first = torch.argsort(torch.where(counted(rewards), -rewards, torch.inf), stable=True)
        order = best_first[torch.argsort(spare[best_first], stable=True)]
        place = torch.empty_like(order)
        place[order] = torch.arange(batch.size, device=order.device)
        rank = batch.groups.rank(place.to(torch.float64), fits)
        return fits & (rank < self.max_external)
