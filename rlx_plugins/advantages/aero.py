"""AERO: a posterior success rate keeps groups whose rollouts all agree from having no advantage."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from ..core.batch import RolloutBatch
from ..core.errors import ConfigError, DataError
from ..core.kinds import Advantage, Columns
from ..core.params import param
from ..core.registry import register
from ..core.segments import counted, wide
from ..core.terms import masked


@register("advantage", "aero")
@dataclass
class AERO(Advantage):
    """Compares the rewards of a group whose rollouts all got the same with the posterior mean of its success rate,
    which never reaches 0 or 1: such groups keep a small advantage that shrinks with the evidence. Mixed ones use GRPO.

    With c successes among n rollouts and a Beta(a0, b0) prior, u = (c + a0) / (n + a0 + b0):
    mixed: A_i = (x_i - mean) / (std + eps) over the kept rows, or with stats="full" over all n rollouts,
    A_i = (s_i - p) / (sqrt(n p (1-p) / (n - ddof)) + eps) with p = c/n and s_i = [success];
    all equal: (x_i - u) / sqrt(u (1-u)) ("bernoulli"), 2u - 1 ("constant"), or 0 ("zero", GRPO).

    Reads rewards [B], meant to be 0 or 1 (NaN = unscorable), group [B], response_mask [B,T], and where the batch has
    them n_success and n_total [B]: counts over every scorable rollout of the prompt, before an allocator rejected some
    (NaN or absent: the kept rows are counted). Returns advantages [B,T], 0 where masked and for unscorable rows, and
    `posterior_mean` [B]. DataError where n_success > n_total, or fewer rollouts were counted than kept.

    A group of one is homogeneous. With "bernoulli" or "constant" such groups must reach this estimator: a filter that
    drops them leaves it nothing to do. The formula of homogeneous groups, the prior and "full" are reconstructed.
    """

    paper = (
        "Train Less, Learn More: Adaptive Efficient Rollout Optimization for Group-Based Reinforcement Learning, "
        "arXiv 2602.14338"
    )
    provides = frozenset({"posterior_mean"})

    prior_success: float = param(1.0, gt=0, doc="a0 of the Beta prior; reconstructed")
    prior_failure: float = param(1.0, gt=0, doc="b0 of the Beta prior; reconstructed")
    homogeneous: Literal["bernoulli", "constant", "zero"] = param("bernoulli", doc="advantage of a group that agrees")
    stats: Literal["kept", "full"] = param("kept", doc="rows behind a mixed group's mean and std; summary: kept")
    success_threshold: float = param(0.5, doc="a rollout succeeded if its reward is above it")
    eps: float = param(1e-6, gt=0, doc="added to the standard deviation; verl")
    ddof: int = param(1, ge=0, le=1, doc="1: unbiased standard deviation; verl")
    tolerance: float = param(1e-9, ge=0, doc="rewards that differ by no more agree")

    def check_beside(self, parts: Any) -> None:
        for allocator in parts["allocator"]:
            if allocator.name == "aero" and bool(allocator.n_homogeneous) == (self.homogeneous == "zero"):
                raise ConfigError(
                    f"advantage aero.homogeneous={self.homogeneous!r} does not go with allocator aero.n_homogeneous="
                    f"{allocator.n_homogeneous}: rows of groups that agree are kept to be trained on; keep some and use"
                    " 'bernoulli' or 'constant', or none (0) and 'zero'"
                )

    def __call__(self, batch: RolloutBatch) -> Columns:
        rewards, groups = wide(batch.rewards), batch.groups
        scorable = counted(rewards)
        success = (rewards > self.success_threshold).to(rewards.dtype)
        c, n = self.counts(batch, success, scorable)
        u = groups.spread((c + self.prior_success) / (n + self.prior_success + self.prior_failure))
        mixed = groups.spread(groups.max(rewards) - groups.min(rewards) > self.tolerance)
        if self.homogeneous == "bernoulli":
            agreeing = (rewards - u) / (u * (1 - u)).sqrt()
        else:
            agreeing = 2 * u - 1 if self.homogeneous == "constant" else torch.zeros_like(u)
        if self.stats == "kept":
            mean, std, _ = groups.mean_std(rewards, ddof=self.ddof)
            score = rewards
        else:
            mean, score = c / n.clamp(min=1), success
            std = (n * mean * (1 - mean) / (n - self.ddof).clamp(min=1)).sqrt()
        apart = (score - groups.spread(mean)) / (groups.spread(std) + self.eps)
        advantages = masked(torch.where(mixed, apart, agreeing), scorable)
        return {"advantages": batch.spread(advantages), "posterior_mean": u}

    def counts(self, batch: RolloutBatch, success: Tensor, scorable: Tensor) -> tuple[Tensor, Tensor]:
        """(successes, rollouts) [G]: as given on the group's first scorable row, else counted over the kept rows."""
        groups = batch.groups
        kept = groups.count(success, scorable)
        c, n = groups.sum(success, scorable), kept
        if not (batch.has("n_success") and batch.has("n_total")):
            return c, n
        rows = torch.arange(batch.size, device=batch.device).to(torch.float64)
        first = masked(groups.min(rows, scorable), kept > 0).long()
        given_c, given_n = (batch[name].to(success.dtype)[first] for name in ("n_success", "n_total"))
        given = (kept > 0) & torch.isfinite(given_c) & torch.isfinite(given_n)
        wrong = given & ((given_c > given_n) | (given_n < kept))
        if bool(wrong.any()):
            g = int(wrong.nonzero()[0, 0])
            raise DataError(
                f"group {int(groups.ids[g])}: n_success {given_c[g]:g} and n_total {given_n[g]:g} do not fit"
                f" {int(kept[g])} scorable rows; they count every scorable rollout of the prompt"
            )
        return torch.where(given, given_c, c), torch.where(given, given_n, n)
