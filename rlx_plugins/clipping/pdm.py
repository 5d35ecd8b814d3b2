"""PDM: DPPO's mask with the direction of travel predicted over the vocabulary instead of read off the ratio."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from ..core.kinds import Clip
from ..core.params import param
from ..core.registry import register
from ..core.terms import PolicyTerms, masked, masked_mean
from ._divergence import Divergence, masked_policy_gradient

LOG_FLOOR = -27.631021115928547
"""log(1e-12): floor of a probability inside the logarithm of a KL over a support that lacks some tokens."""

Estimator = Literal["aggregate", "uniform"]


class Support(NamedTuple):
    """The tokens the engine reported and the sampled one: [..., K+1] log-probs (-inf: not there), and the rest.

    new, old       log-probs of the policy and of the behaviour; `there` [..., K+1] which entries count
    new_rest, old_rest   probability [...] of the tokens outside
    rest           number [...] of tokens outside
    """

    new: Tensor
    old: Tensor
    there: Tensor
    new_rest: Tensor
    old_rest: Tensor
    rest: Tensor


@register("clip", "pdm")
@dataclass
class PDM(Clip):
    """DPPO drops a token whose distribution has moved too far and whose ratio says that it goes on outwards. Here the
    first-order change of the divergence under one gradient step on this token decides, over the whole vocabulary: a
    token whose own probability fell may still push the distribution away, and the other way round.

        a the sampled token, pi the policy, mu the behaviour;  the step moves the logits along A r (e_a - pi)
        D = KL(mu || pi) or total variation;   g: dD has the sign of A g
        kl:  g = (pi_a - mu_a) - sum_v pi_v (pi_v - mu_v)
        tv:  g = 1/2 [pi_a (s_a - s) - sum_v pi_v^2 (s_v - s)],   s_v = sign(pi_v - mu_v),  s = sum_v pi_v s_v
        dropped:  D > delta (delta_high for A > 0, else delta_low)  and  A g > 0
        L = -A sg(min(r, ratio_cap)) logp_new   where kept, 0 where dropped

    The sums run over the tokens whose log-probs the engine reported and the sampled one; the rest, R, is one more
    outcome in D, and in g either one outcome (`aggregate`: pi_R (pi_R - mu_R)) or spread evenly over its tokens
    (`uniform`: that divided by their number). Both are exact where the engine reports the whole vocabulary.

    Reads rollout_top_ids [B,T,K] int64 and rollout_top_logp [B,T,K] (NaN = no entry), the engine's likeliest tokens at
    the temperature it sampled with (vLLM: `SamplingParams.logprobs`), response_ids, the sampled token's log-prob under
    the behaviour (`denominator`), advantages [B,T], and logits. `from_logits` leaves pdm_divergence and pdm_direction
    (g), detached, per token. A token without entries has two outcomes, itself and the rest, for which g has the sign of
    the ratio's direction: it is judged as in DPPO. Returns the token loss [B,T] and the metrics divergence, dropped
    (among tokens of non-zero advantage), against_ratio: how often the predicted direction and the ratio's disagree.

    `direction="ratio"` is DPPO with a top-K divergence. The closed forms of g are derived, not the paper's text; K and
    the thresholds (0.15 is recalled for tv, 0.05 for kl) are unverified.
    """

    paper = "Predictive Divergence Masks for LLM RL, arXiv 2607.10848"
    capabilities = frozenset({"logits"})
    fixes = {"ratio": None}

    divergence: Divergence = param("tv", doc="total variation or KL")
    estimator: Estimator = param("aggregate", doc="what g makes of the tokens outside the engine's top K")
    delta_low: float = param(0.15, ge=0, doc="largest divergence of a token with A <= 0; DPPO's, recalled for tv")
    delta_high: float = param(0.15, ge=0, doc="largest divergence of a token with A > 0; DPPO's, recalled for tv")
    ratio_cap: float = param(20.0, gt=0, doc="largest importance weight; DPPO's 20")
    log_clamp: float = param(20.0, gt=0, doc="bound on |log ratio| in nats")
    direction: Literal["predictive", "ratio"] = param("predictive", doc="predicted, or DPPO's sign of A (r - 1)")
    denominator: Literal["logp_rollout", "logp_old", "logp_behavior"] = param(
        "logp_rollout", doc="behaviour policy, whose top K the engine reported"
    )

    @property
    def requires(self) -> frozenset[str]:
        return frozenset({self.denominator, "rollout_top_ids", "rollout_top_logp"})

    def __call__(self, terms: PolicyTerms) -> Any:
        mask = terms.mask
        ratio = terms.log_ratio(self.denominator, self.log_clamp).detach().exp()
        divergence, predicted = (masked(terms.logits[f"pdm_{x}"], mask) for x in ("divergence", "direction"))
        keep = self.kept(terms.advantages, divergence, predicted, ratio)
        loss = masked_policy_gradient(terms, ratio.clamp(max=self.ratio_cap), keep)
        pushed = mask & (terms.advantages != 0)
        return loss, {
            "divergence": masked_mean(divergence, mask & torch.isfinite(divergence)),
            "dropped": masked_mean((~keep).to(ratio.dtype), pushed),
            "against_ratio": masked_mean((predicted * (ratio - 1) < 0).to(ratio.dtype), mask),
        }

    def kept(self, advantages: Tensor, divergence: Tensor, predicted: Tensor, ratio: Tensor) -> Tensor:
        """[B,T] bool: within the threshold, or on the way back."""
        up = advantages > 0
        limit = torch.where(
            up, torch.full_like(divergence, self.delta_high), torch.full_like(divergence, self.delta_low)
        )
        outwards = predicted if self.direction == "predictive" else ratio - 1
        return ~((divergence > limit) & (advantages.sign() * outwards.sign() > 0))

    @torch.no_grad()
    def from_logits(self, logits: Tensor, columns: Mapping[str, Tensor]) -> dict[str, Tensor]:
        behaviour = columns[self.denominator]
        if "logp_old" in columns:
            behaviour = torch.where(torch.isnan(behaviour), columns["logp_old"], behaviour)
        wide = torch.promote_types(logits.dtype, torch.float32)
        ids = columns["response_ids"].clamp(0, logits.shape[-1] - 1)[..., None]  # padding may be any number
        normaliser = logits.to(wide).logsumexp(-1, keepdim=True)
        sampled = (logits.gather(-1, ids).to(wide) - normaliser)[..., 0]
        reported = columns["rollout_top_logp"].to(wide)
        valid = ~torch.isnan(reported)
        chosen = torch.where(valid, columns["rollout_top_ids"], ids)
        top = logits.gather(-1, chosen).to(wide) - normaliser
        support = _support(sampled, behaviour.to(wide), top, reported, valid, chosen == ids, logits.shape[-1])
        divergence, direction = self.tv(support) if self.divergence == "tv" else self.kl(support)
        return {"pdm_divergence": divergence, "pdm_direction": direction}

    def kl(self, s: Support) -> tuple[Tensor, Tensor]:
        """(D, g) [...] of the KL from the behaviour to the policy."""
        pi, mu = s.new.exp(), s.old.exp()
        partial = (s.rest > 0)[..., None]
        new, old = (torch.where(partial, x.clamp(min=LOG_FLOOR), x) for x in (s.new, s.old))
        inside = masked(mu * (old - new), s.there & (mu > 0)).sum(-1)
        rest = s.old_rest * (_floored_log(s.old_rest) - _floored_log(s.new_rest))
        tail = self._shared(s.new_rest * (s.new_rest - s.old_rest), s.rest)
        return inside + rest, (pi - mu)[..., -1] - masked(pi * (pi - mu), s.there).sum(-1) - tail

    def tv(self, s: Support) -> tuple[Tensor, Tensor]:
        """(D, g) [...] of the total variation."""
        pi, mu = s.new.exp(), s.old.exp()
        gap, rest_gap = masked(pi - mu, s.there), s.new_rest - s.old_rest
        sign, rest_sign = gap.sign(), rest_gap.sign()
        mean = (pi * sign).sum(-1) + s.new_rest * rest_sign
        spread = masked(pi.square() * (sign - mean[..., None]), s.there).sum(-1)
        tail = self._shared(s.new_rest.square() * (rest_sign - mean), s.rest)
        own = (pi - mu)[..., -1].sign()
        return (gap.abs().sum(-1) + rest_gap.abs()) / 2, (pi[..., -1] * (own - mean) - spread - tail) / 2

    def _shared(self, tail: Tensor, rest: Tensor) -> Tensor:
        """The sum over the tokens outside, from its value for them as one outcome."""
        return tail if self.estimator == "aggregate" else tail / rest.clamp(min=1)


def _support(
    sampled: Tensor, behaviour: Tensor, top: Tensor, reported: Tensor, valid: Tensor, is_sampled: Tensor, size: int
) -> Support:
    """Both distributions over the reported tokens and, last, the sampled one, which counts once.

    sampled, behaviour [...]: its log-prob under the policy and the behaviour; top, reported [..., K]: of the others;
    valid [..., K]: which are there; is_sampled [..., K]: which are the sampled token; size: V.
    """
    others = valid & ~is_sampled
    there = torch.cat([others, torch.ones_like(others[..., :1])], -1)
    listed = valid & is_sampled
    own = torch.where(listed.any(-1), masked(reported, listed).sum(-1), behaviour)
    empty = torch.full_like(top[..., :1], -torch.inf)
    new = torch.where(there, torch.cat([top, sampled[..., None]], -1), empty)
    old = torch.where(there, torch.cat([masked(reported, others), own[..., None]], -1), empty)
    rest = size - there.sum(-1)
    new_rest, old_rest = (masked((1 - x.exp().sum(-1)).clamp(min=0), rest > 0) for x in (new, old))
    return Support(new, old, there, new_rest, old_rest, rest)


def _floored_log(p: Tensor) -> Tensor:
    return p.clamp(min=1e-12).log()
