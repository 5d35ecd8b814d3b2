"""HAPO: rewards normalised over tokens, and advantages redistributed by the tokens' entropy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ..core.batch import RolloutBatch
from ..core.kinds import Columns
from ..core.params import param
from ..core.registry import register
from ..core.segments import counted, wide, zscore
from ..core.terms import PolicyTerms, masked
from ._base import Base, OnBase
from ._entropy_score import adaptive_range, entropy_score


@register("advantage", "hapo")
@dataclass
class HAPO(OnBase):
    """Normalises rewards inside the group over tokens, so that the mean advantage per token is 0; inside the loss,
    uncertain tokens that have moved are amplified and confident ones that have hardly moved are damped.

    Over the tokens of a group, n_i of row i:

        mu = sum n_i r_i / sum n_i,   sd = sqrt(sum n_i (r_i - mu)^2 / sum n_i),   A_i = (r_i - mu) / (sd + eps)

    and GRPO's z-score where some |A_i| >= guard (extreme imbalance of lengths). With the entropy score h [B,T] in
    [-1, 1] (_entropy_score.py), the ratio rho = exp(logp_new - logp_old) and its adaptive range el, eh (clip=hapo):

        inside = 1 - el/2 < rho < 1 + eh/2,   A' = A (1 + beta h) where inside = (h <= 0), A elsewhere.

    Reads rewards [B] (NaN = unscorable), group [B], response_mask, entropy and logp_old [B,T]; in the loss logp_new.
    Returns advantages [B,T], 0 where masked and for unscorable rows; `entropy_score` [B,T], h, which clip=hapo reads;
    `fallback` [B] bool, rows whose group fell back to GRPO. Nothing here carries gradient. Rows without tokens take no
    part; a group of one has advantage 0.

    `base` puts the redistribution on another estimator instead of the token-level average. The paper's score is signed;
    the released code's lower side loses its sign (`signed=False`), so confident tokens are never damped there. The code
    scores the entropies of the current forward within each micro-batch (`statistics="micro"`); the default takes
    those of the step's start over the whole batch, which no split changes. The code's guard looks at padding too; this
    one does not.
    """

    paper = "Heterogeneous Adaptive Policy Optimization, arXiv 2509.16591"
    reads = frozenset({"entropy", "logp_old", "entropy_score"})
    makes = frozenset({"entropy_score"})

    quantile: float = param(0.8, ge=0, le=1, doc="log-entropy at which the score is 0; the code's rho")
    beta: float = param(1.0, ge=0, le=1, doc="strength of the redistribution; 0: none; code")
    alpha: float = param(1.0, ge=0, doc="how far the clip range widens with |h|; code")
    eps_low: float = param(0.2, gt=0, lt=1, doc="clip distance below 1 at h >= 0; code")
    eps_high: float = param(0.2, gt=0, lt=1, doc="clip distance above 1 at h <= 0; code")
    guard: float = param(5.0, gt=0, doc="largest |A| of the token-level average; code")
    eps: float = param(1e-6, gt=0, doc="added to the standard deviation; code")
    signed: bool = param(True, doc="False: the score's lower side positive too; released code")
    statistics: Literal["batch", "micro"] = param("batch", doc="whose entropies make the score; ours, code: micro")
    base: Base | None = param(None, doc="estimator to redistribute; None: the token-level average")

    @property
    def scope(self) -> str:  # type: ignore[override]
        return "micro" if self.statistics == "micro" else "batch"

    @property
    def idle_hooks(self) -> frozenset[str]:
        return frozenset() if self.beta else frozenset({"in_loss"})

    def __call__(self, batch: RolloutBatch) -> Columns:
        score = entropy_score(batch.entropy, batch.response_mask, self.quantile, self.signed)
        if self.estimator is not None:
            return dict(self.estimator(batch)) | {"entropy_score": score}
        advantages, fallback = self.token_average(batch)
        return {"advantages": batch.spread(advantages), "entropy_score": score, "fallback": fallback}

    def token_average(self, batch: RolloutBatch) -> tuple[Tensor, Tensor]:
        """(v [B], the z-score of the reward over the group's tokens, or GRPO's; whether it is GRPO's)."""
        rewards, groups = wide(batch.rewards), batch.groups
        pool = counted(rewards, batch.lengths > 0)
        n = masked(batch.lengths, pool).to(rewards.dtype)
        total = groups.spread(groups.sum(n)).clamp(min=1)
        from_top = masked(rewards - groups.spread(groups.max(rewards, pool)), pool)  # equal rewards stay exactly 0
        centred = masked(from_top - groups.spread(groups.sum(n * from_top)) / total, pool)
        std = (groups.spread(groups.sum(n * centred.square())) / total).sqrt()
        values = centred / (std + self.eps)
        fallback = groups.spread(groups.max(values.abs(), pool)) >= self.guard
        return torch.where(fallback, zscore(groups, rewards, self.eps, where=pool), values), fallback

    def in_loss(self, terms: PolicyTerms) -> Tensor:
        if self.statistics == "micro":
            score = entropy_score(terms.entropy, terms.mask, self.quantile, self.signed)
        else:
            score = terms.batch.entropy_score
        ratio = terms.log_ratio("logp_old", clamp=20.0).detach().exp()
        low, high = adaptive_range(score, self.eps_low, self.eps_high, self.alpha)
        inside = (1 - low / 2 < ratio) & (ratio < 1 + high / 2)
        scaled = terms.advantages * (1 + self.beta * score).to(terms.advantages.dtype)
        return torch.where(inside == (score <= 0), scaled, terms.advantages)
