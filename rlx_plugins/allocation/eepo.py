"""EEPO: half of a group is sampled, then unlearnt for a moment, so that the other half looks elsewhere."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ..core.batch import RolloutBatch
from ..core.context import Context
from ..core.kinds import Allocator
from ..core.operations import Restore, Steps, Unlearn
from ..core.params import param
from ..core.registry import register
from ..core.state import state
from ..core.terms import masked, masked_mean
from ..core.trajectory import Group

ELSEWHERE = "elsewhere"
"""Tag of a rollout sampled after unlearning; it is the row's `source` in the batch."""


@register("allocator", "eepo")
@dataclass
class EEPO(Allocator):
    """When the policy's entropy has been low for a few steps, half of each group is sampled as usual; one gradient step
    on the sampling weights makes exactly these samples less likely, and the other half is drawn from the altered
    weights, which are then thrown away. The trained weights are never touched by it.

    Active where the mean entropy (nats) of the last `window` steps is below `threshold`; else a plain group. The step
    descends L = mean over rows of the mean over their tokens of -log(1 - min(p, 1 - eps)), p the probability of the
    sampled token; "nll" descends the mean log-probability. Stage 1 has floor(group_size / 2) rollouts.

    Both stages are one group. The ratio of a row divides by the policy that sampled it: `logp_behavior` on rows of
    stage 2, for a ratio with `denominator: logp_behavior` (`method: eepo`).

    A circulating summary says ascent on this loss; that would make the samples likelier, and contradict the method.
    eps and the mean per row are reconstructed.
    """

    paper = "EEPO: Exploration-Enhanced Policy Optimization via Sample-Then-Forget, arXiv 2510.05837"
    scope = "batch"
    requires = frozenset({"entropy"})
    provides = frozenset({"logp_behavior"})
    capabilities = frozenset({"rounds", "unlearn"})

    window: int = param(3, ge=1, doc="steps the entropy is averaged over, m; the paper's 3")
    threshold: float = param(0.3, gt=0, doc="entropy (nats) below which it acts, alpha; the paper's 0.3")
    learning_rate: float = param(3e-3, gt=0, doc="of the step on the sampling weights; the paper's 3e-3")
    eps: float = param(1e-6, gt=0, lt=1, doc="1 - eps is the largest probability that has a gradient; reconstructed")
    loss: Literal["complementary", "nll"] = param("complementary", doc="what the step descends; the paper's, or nll")

    entropies: list = state(factory=list)

    def more(self, idle: list[Group], ctx: Context) -> Steps:
        active = self.active(self.entropies)
        first = ctx.group_size // 2
        new = [r for g in idle if not g.rollouts for r in g.start(first if active and first else ctx.group_size)]
        ctx.log("allocator/eepo_active", float(active))
        if new or not active or not first:
            return new
        half = [g for g in idle if len(g.rollouts) == first]
        if half:
            yield Unlearn([r for g in half for r in g.done()], self.unlearning_loss, self.learning_rate)
            new = [r for g in half for r in g.start(ctx.group_size - first)]
            for r in new:
                r.tag = ELSEWHERE
        else:
            yield Restore()
        return new

    def feedback(self, batch: RolloutBatch, ctx: Context) -> None:
        entropy = float(masked_mean(batch.entropy, batch.response_mask))
        if math.isfinite(entropy):
            self.entropies = [*self.entropies, entropy][-self.window :]

    def average(self, entropies: Sequence[float]) -> float:
        """Mean of the last `window` finite entropies; NaN without any."""
        known = [h for h in entropies if math.isfinite(h)][-self.window :]
        return sum(known) / len(known) if known else math.nan

    def active(self, entropies: Sequence[float]) -> bool:
        """Whether the entropy has been low."""
        return self.average(entropies) < self.threshold

    def unlearning_loss(self, logp: Tensor, mask: Tensor) -> Tensor:
        """The loss [] that the step descends, of log-probabilities [R,T] where `mask` [R,T] is on."""
        if self.loss == "nll":
            per_token = logp
        else:
            bound = torch.full_like(logp, 1 - self.eps)
            per_token = -torch.log1p(-torch.minimum(masked(logp, mask).exp(), bound))
        n = mask.sum(1)
        per_row = masked(per_token, mask).sum(1) / n.clamp(min=1)
        return per_row.sum() / (n > 0).sum().clamp(min=1)
