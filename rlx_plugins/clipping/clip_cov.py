"""Clip-Cov: take a few tokens of high covariance out of the update to keep the entropy up."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..core.batch import RolloutBatch
from ..core.errors import ConfigError
from ..core.kinds import Clip
from ..core.params import param
from ..core.randomness import row_uniform
from ..core.registry import register
from ..core.terms import PolicyTerms, clipped_surrogate, masked_mean
from ._covariance import share_of, token_covariance
from ._order import first_k

_GOLDEN_GAMMA = -7046029254386353131
"""0x9E3779B97F4A7C15 as a signed integer: the step of a splitmix64 stream."""


@register("clip", "clip_cov")
@dataclass
class ClipCov(Clip):
    """Tokens whose advantage and log-probability rise together make the entropy collapse; a random few of them are left
    out of the update. All others follow PPO's clipped surrogate.

    cov = (A - mean A)(logp_new - mean logp_new). Candidates: cov_low < cov < cov_high, gradient not already clipped.
    max(1, floor(drop_share * tokens)) of them, drawn uniformly, get loss 0.

    Reads ratio and advantages [B,T]; returns the token loss [B,T]. The means and the number dropped are those of the
    micro-batch. verl does not bound the log ratio here: `ratio: {name: token, log_clamp: null}`.
    """

    paper = "The Entropy Mechanism of Reinforcement Learning for Reasoning Language Models, arXiv 2505.22617"
    scope = "micro"

    eps_low: float = param(0.2, ge=0, doc="PPO's range starts at 1 - eps_low; 0.2")
    eps_high: float = param(0.2, ge=0, doc="PPO's range ends at 1 + eps_high; 0.2")
    drop_share: float = param(2e-4, gt=0, le=1, doc="share of the tokens left out; verl's 2e-4 (`clip_cov_ratio`)")
    cov_low: float = param(1.0, doc="candidates lie above this covariance; 1.0 (`clip_cov_lb`)")
    cov_high: float = param(5.0, doc="and below this one; 5.0 (`clip_cov_ub`)")

    def check(self) -> None:
        if not self.cov_low < self.cov_high:
            raise ConfigError(f"clip clip_cov.cov_high: must be > cov_low ({self.cov_low:g}), got {self.cov_high:g}")

    def __call__(self, terms: PolicyTerms) -> Any:
        low, high = 1 - self.eps_low, 1 + self.eps_high
        loss = clipped_surrogate(terms.ratio, terms.advantages, low, high)
        free = (-terms.advantages * terms.ratio >= loss).detach()
        cov = token_covariance(terms)
        candidates = terms.mask & free & (cov > self.cov_low) & (cov < self.cov_high)
        drop = first_k(token_uniform(terms.batch), candidates, share_of(terms.mask.sum(), self.drop_share))
        loss = torch.where(drop, torch.zeros_like(loss), loss)
        return loss, {"dropped": masked_mean(drop.to(loss.dtype), terms.mask)}


def token_uniform(batch: RolloutBatch) -> Tensor:
    """[B,T] float64 in [0, 1): a splitmix64 stream per row, seeded by the row's draw (or the draw itself if [B,T])."""
    draw = batch.uniform("clip_cov/drop")
    if draw.ndim == 2:
        return draw
    seed = (draw.to(torch.float64) * 2**53).to(torch.int64)
    token = torch.arange(batch.response_mask.shape[1], device=seed.device)
    return row_uniform(seed[:, None] + token * _GOLDEN_GAMMA)
