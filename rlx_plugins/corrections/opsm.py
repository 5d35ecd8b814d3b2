"""Off-policy sequence masking: leave failed rollouts the policy has moved away from out of the update."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..core.batch import RolloutBatch
from ..core.kinds import Columns, Correction
from ..core.params import param
from ..core.registry import register
from ..core.terms import masked, masked_mean


@register("correction", "opsm")
@dataclass
class OPSM(Correction):
    """A failed rollout teaches something only while the policy would still produce it. Rows of negative advantage are
    masked once their tokens have become unlikely.

    weight = 1 where A >= 0 or mean_t(logp_rollout - logp_old) <= threshold, else 0 [B,T]; tokens the engine has no
    log-prob for count as 0 in the mean. Masked rows stay in the loss's count, as in TRL (`off_policy_mask_threshold`).

    Weights are made once per step, before the update: the drift measured is staleness plus the mismatch between engine
    and trainer. TRL measures it against the current policy, so that the updates of the step itself count too.
    """

    paper = "DeepSeek-V3.2: Pushing the Frontier of Open Large Language Models, arXiv 2512.02556"
    requires = frozenset({"logp_old", "logp_rollout"})
    masks_only = True

    threshold: float = param(0.5, doc="bound on a row's mean log-ratio, nats per token; TRL's example 0.5")

    def __call__(self, batch: RolloutBatch) -> Columns:
        mask = batch.response_mask
        known = mask & ~torch.isnan(batch.logp_rollout)
        drift = masked(batch.logp_rollout - batch.logp_old, known)
        near = masked_mean(drift, mask, dim=1) <= self.threshold
        keep = near[:, None] | (batch.advantages >= 0)
        return {"weight": (keep & mask).to(batch.dtype)}
