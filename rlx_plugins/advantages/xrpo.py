"""XRPO: correct answers the policy finds unlikely count more."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..core.batch import RolloutBatch
from ..core.kinds import Columns
from ..core.params import param
from ..core.registry import register
from ..core.segments import counted, wide
from ..core.terms import masked
from ._base import Base, OnBase


@register("advantage", "xrpo")
@dataclass
class XRPO(OnBase):
    """Raises the positive advantages of rollouts that are less likely, per token, than their group's average.

    The bonus grows with that novelty and is capped at a share of the advantage, so it never turns a sign; failures are
    left alone.

    s_i = mean over the row's tokens of logp_old;   eta_i = exp(s_i - mean of s over the group);
    A_i > 0:  A_i + min(max(novelty_weight (1 - eta_i), 0), max_bonus A_i);   A_i otherwise.

    Reads logp_old [B,T] (nats; the policy that generated, or its recomputation), rewards [B] (NaN = unscorable),
    group [B], response_mask [B,T] and what `base` reads; returns advantages [B,T], 0 where masked and for unscorable
    rows, and `novelty` [B], eta. Rows without tokens or reward do not enter the mean of s; a row without tokens has
    eta 1. A sharpened group no longer sums to 0.

    This is the credit part of XRPO. eps and ddof of the z-score are reconstructed; `base` is the estimator underneath,
    grpo in the paper. A base with advantages per token is sharpened token by token.
    """

    paper = "XRPO: eXplore - eXploit GRPO, arXiv 2510.06672"
    reads = frozenset({"logp_old"})
    makes = frozenset({"novelty"})

    novelty_weight: float = param(2.5, ge=0, doc="size of the bonus; paper's lambda")
    max_bonus: float = param(0.5, ge=0, doc="largest bonus as a share of the advantage; paper's kappa")
    base: Base = param("grpo", doc="estimator underneath; paper")

    def __call__(self, batch: RolloutBatch) -> Columns:
        columns = dict(self.estimator(batch))
        novelty = self.novelty(batch)
        return columns | {"advantages": self.sharpened(columns["advantages"], novelty), "novelty": novelty}

    def sharpened(self, advantages: Tensor, novelty: Tensor) -> Tensor:
        """[B,T] advantages with the bonus of their row's novelty [B]."""
        bonus = (self.novelty_weight * (1 - novelty[:, None])).clamp(min=0).to(advantages.dtype)
        most = (self.max_bonus * advantages).clamp_(min=0)  # none for failures
        return advantages + torch.minimum(bonus, most)

    def novelty(self, batch: RolloutBatch) -> Tensor:
        """eta [B]: likelihood per token relative to the group's average."""
        groups, nonempty = batch.groups, batch.lengths > 0
        likelihood = masked(wide(batch.logp_old), batch.response_mask).sum(1) / batch.lengths.clamp(min=1)
        members = counted(batch.rewards) & nonempty
        known = nonempty & (groups.spread(groups.count(likelihood, members)) > 0)
        return masked(likelihood - groups.spread(groups.mean(likelihood, members)), known).exp()
