"""DPPO: a token stops pushing once its distribution has moved too far, whatever its ratio."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from ..core.kinds import Clip
from ..core.params import param
from ..core.registry import register
from ..core.terms import PolicyTerms, masked, masked_mean
from ._divergence import Divergence, binary_divergence, masked_policy_gradient, reference_logp


class Moved(NamedTuple):
    """Detached, [B,T] each: the divergence, and whether the token keeps its gradient; 0 and True where masked."""

    divergence: Tensor
    keep: Tensor


@register("clip", "dppo")
@dataclass
class DPPO(Clip):
    """In place of the ratio, limits how far the distribution at a token has moved from the one that sampled it, judged
    by two outcomes: this token, or any other. A token loses its gradient when the divergence is above the threshold and
    the update would push it further the way it has gone; a rare token may multiply its probability many times.

        p = exp(logp_new), q = exp(logp_denominator);  D = |p - q| (tv), or the KL of (q, 1-q) from (p, 1-p) (kl)
        dropped:  A > 0 and p > q and D > delta_high,   or   A <= 0 and p < q and D > delta_low
        L = -A sg(min(r, ratio_cap)) logp_new   where kept, 0 where dropped;   r = exp(clamp(logp_new - logp_den, +-20))

    Reads logp_new, advantages and the denominator's log-probs [B,T]; returns the token loss [B,T] and the metrics
    divergence, dropped (among tokens of non-zero advantage), capped. Dropped tokens stay in the loss's count. A live
    token that the reference gives probability 0 is dropped. Divergences are computed in float32 at least.

    verl has it as `dppo_tv` and `dppo_kl`: delta_* are its clip_ratio_low/high, ratio_cap its clip_ratio_c, which is
    3.0 there unless set. The release divides by the engine's policy (`denominator: logp_rollout`). Recalled, not
    verified: the published runs used thresholds of 0.15 (tv) and 0.05 (kl). `clip: pdm` looks at more outcomes.
    """

    paper = "Rethinking the Trust Region in LLM Reinforcement Learning, arXiv 2602.04879"
    fixes = {"ratio": None}

    variant: Divergence = param("tv", doc="total variation or KL of the two outcomes")
    delta_low: float = param(0.2, ge=0, doc="largest divergence of a token with A <= 0; verl's clip_ratio_low 0.2")
    delta_high: float = param(0.2, ge=0, doc="largest divergence of a token with A > 0; verl's clip_ratio_high 0.2")
    ratio_cap: float = param(20.0, gt=0, doc="largest importance weight; 20 meant by verl's code, 3.0 its config")
    log_clamp: float = param(20.0, gt=0, doc="bound on |log ratio| in nats; verl's 20")
    denominator: Literal["logp_old", "logp_rollout", "logp_behavior"] = param("logp_old", doc="policy q; verl's")

    @property
    def requires(self) -> frozenset[str]:
        return frozenset({self.denominator})

    def __call__(self, terms: PolicyTerms) -> Any:
        moved = self.moved(terms)
        ratio = terms.log_ratio(self.denominator, self.log_clamp).detach().exp()
        loss = masked_policy_gradient(terms, ratio.clamp(max=self.ratio_cap), moved.keep)
        pushed = terms.mask & (terms.advantages != 0)
        return loss, {
            "divergence": masked_mean(moved.divergence, terms.mask & torch.isfinite(moved.divergence)),
            "dropped": masked_mean((~moved.keep).to(ratio.dtype), pushed),
            "capped": masked_mean((ratio > self.ratio_cap).to(ratio.dtype), terms.mask),
        }

    def moved(self, terms: PolicyTerms) -> Moved:
        """Divergence and keep mask of every token of the micro-batch."""
        mask = terms.mask
        logp, reference = masked(terms.logp_new.detach(), mask), reference_logp(terms, self.denominator)
        wide = torch.promote_types(logp.dtype, torch.float32)
        logp, reference = logp.to(wide), reference.to(wide)
        divergence = masked(binary_divergence(logp, reference, self.variant), mask)
        up = terms.advantages > 0
        limit = torch.where(up, torch.full_like(logp, self.delta_high), torch.full_like(logp, self.delta_low))
        further = torch.where(up, logp > reference, logp < reference)
        impossible = torch.isneginf(reference)
        return Moved(divergence, ~mask | ~((divergence > limit) & further | impossible))
