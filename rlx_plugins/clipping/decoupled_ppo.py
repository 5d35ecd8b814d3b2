"""Decoupled PPO without a forward pass for the proximal policy: it is interpolated from the versions of the tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..core.kinds import Clip
from ..core.params import param
from ..core.registry import register
from ..core.terms import PolicyTerms, clip_fraction, clipped_surrogate, masked, masked_mean
from ..corrections.decoupled_ppo import WEIGHT_CLAMP, CapMode, capped
from ..ratios._exp import exp

LOG_CLAMP = 20.0
"""Bound on the ratio's exponent in nats."""


class Interpolated(NamedTuple):
    """[B,T]: log-prob of the interpolated policy and weight (detached), ratio over it (with gradient)."""

    logp_prox: Tensor
    weight: Tensor
    ratio: Tensor


@register("clip", "decoupled_ppo")
@dataclass
class DecoupledPPOClip(Clip):
    """The proximal policy, one update behind the current one, is taken to lie on the line from the policy that sampled
    the token to the current one, in log-probability and in proportion to the weight updates between them.

        s = staleness (updates since the token was sampled);   alpha = (s - 1) / s for s >= 1, else 0
        logp_prox = logp_rollout + alpha (sg logp_new - logp_rollout);   w = exp(logp_prox - logp_rollout)
        r = exp(logp_new - logp_prox),   L = w max(-A r, -A clip(r, 1 - eps_low, 1 + eps_high)), dual clip optional

    Reads logp_new, advantages, logp_rollout, staleness [B,T] (or [B]); returns the token loss [B,T] and the metrics
    clipped and weight. Above `cap` a token's w is 0 or the cap. The ratio's exponent is bounded by 20 nats, the
    weight's by 60; a token with an infinite log-prob carries neither weight other than 1 nor gradient. AReaL's variant
    that is linear in probability is left out.
    """

    paper = "AReaL: A Large-Scale Asynchronous Reinforcement Learning System for Language Reasoning, arXiv 2505.24298"
    requires = frozenset({"logp_rollout", "staleness"})
    fixes = {"ratio": None}
    denominator = "logp_rollout"

    eps_low: float = param(0.2, ge=0, doc="the range starts at 1 - eps_low; AReaL's 0.2")
    eps_high: float = param(0.2, ge=0, doc="the range ends at 1 + eps_high; AReaL's 0.2")
    dual_clip: float | None = param(None, gt=1, doc="bound for negative advantages; None: off")
    cap: float | None = param(None, gt=0, doc="largest weight; AReaL's legacy default 5; None: no bound")
    cap_mode: CapMode = param("mask", doc="a token above the cap: weight 0 (AReaL's mask), or the cap (its clamp)")

    def __call__(self, terms: PolicyTerms) -> Any:
        found = self.interpolate(terms)
        low, high = 1 - self.eps_low, 1 + self.eps_high
        loss = clipped_surrogate(found.ratio, terms.advantages, low, high, self.dual_clip)
        return masked(found.weight * loss, terms.mask), {
            "clipped": clip_fraction(found.ratio, terms.advantages, low, high, terms.mask),
            "weight": masked_mean(found.weight, terms.mask),
        }

    def interpolate(self, terms: PolicyTerms) -> Interpolated:
        """The proximal policy of every token, what it weighs, and the ratio over it."""
        d = terms.log_ratio(self.denominator)
        d = masked(d, torch.isfinite(d))
        stale = terms.batch.staleness.to(d.dtype)
        stale = (stale[:, None] if stale.ndim == 1 else stale).clamp(min=1)
        behind = masked((stale - 1) / stale, terms.mask)
        moved = behind * d.detach()
        weight = masked(moved.clamp(-WEIGHT_CLAMP, WEIGHT_CLAMP).exp(), terms.mask)
        rest = masked(terms.logp_new.detach(), terms.mask) - (d.detach() - moved)
        return Interpolated(
            rest, capped(weight, self.cap, self.cap_mode), exp((d - moved).clamp(-LOG_CLAMP, LOG_CLAMP))
        )
