"""The clip of rollout replay: the interval is centred on the ratio the step started with."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

from ..core.kinds import Clip
from ..core.params import param
from ..core.registry import register
from ..core.terms import PolicyTerms, clip_fraction, clipped_surrogate, masked_mean
from ..ratios._exp import exp


@register("clip", "rollout_replay")
@dataclass
class RolloutReplayClip(Clip):
    """The ratio divides by the policy that sampled the row, however old; what is clipped is its movement since the step
    began, so an old row is neither discarded nor allowed to run away.

    r = exp(logp_new - logp_behaviour), r_old = exp(logp_old - logp_behaviour);
    L = max(-A r, -A clip(r, r_old (1 - eps_low), r_old (1 + eps_high))).

    Reads logp_old, advantages and the `denominator` [B,T]; returns the token loss [B,T]. Where the sampling
    log-probability is unknown (NaN), logp_old stands in for it: r_old = 1, PPO's clip. It makes its own ratio, with
    log-ratios bounded by `log_clamp`.
    """

    paper = (
        "Improving Data Efficiency for LLM Reinforcement Fine-tuning Through Difficulty-targeted Online Data Selection"
        " and Rollout Replay, arXiv 2506.05316"
    )
    fixes = {"ratio": None}

    eps_low: float = param(0.2, ge=0, lt=1, doc="the interval starts at r_old (1 - eps_low); the release's 0.2")
    eps_high: float = param(0.2, ge=0, doc="the interval ends at r_old (1 + eps_high); the release's 0.2")
    denominator: Literal["logp_rollout", "logp_behavior"] = param("logp_rollout", doc="policy the ratio divides by")
    log_clamp: float | None = param(20.0, gt=0, doc="bound on |log ratio| in nats; None: unbounded")

    @property
    def requires(self) -> frozenset[str]:
        return frozenset({"logp_old", self.denominator})

    def __call__(self, terms: PolicyTerms) -> Any:
        ratio = exp(terms.log_ratio(self.denominator, self.log_clamp))
        start = dataclasses.replace(terms, logp_new=terms.batch.logp_old.to(terms.logp_new.dtype))
        centre = start.log_ratio(self.denominator, self.log_clamp).exp()
        low, high = centre * (1 - self.eps_low), centre * (1 + self.eps_high)
        loss = clipped_surrogate(ratio, terms.advantages, low, high)
        metrics = {
            "clipped": clip_fraction(ratio, terms.advantages, low, high, terms.mask),
            "centre": masked_mean(centre, terms.mask),
        }
        return loss, metrics
