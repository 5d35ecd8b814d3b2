"""The effective sample size of the importance ratios in place of a clip range."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from ..core.kinds import Clip
from ..core.params import param
from ..core.registry import register
from ..core.terms import PolicyTerms, masked, masked_mean
from ._divergence import masked_policy_gradient

SMALLEST_PULL = 1e-6
"""A pull 1 - ESS at or below this is left out of the mixture's term."""


class Drift(NamedTuple):
    """From one reference policy, [B,T] (ess broadcasts): log ratio with gradient, detached ratio, effective size."""

    log_ratio: Tensor
    ratio: Tensor
    ess: Tensor


@register("clip", "ess")
@dataclass
class ESS(Clip):
    """One number measured on the batch, the normalised effective sample size of the importance ratios, takes the place
    of tuned clip ranges: it caps every ratio, and what it lacks to 1 is the weight of a pull to the behaviour policy.
    Fresh data gives REINFORCE without a pull; stale data gives small steps and a strong pull.

        d = logp_new - logp_denominator, r = exp(d);   ESS = sg (sum r)^2 / (n (sum r^2 + eps)) over the model tokens
        L = -sg(min(r, ESS)) A logp_new + (1 - ESS) k3,   k3 = d + exp(clamp(-d, +-kl_clamp)) - 1

    Reads logp_new, advantages and the denominator's log-probs [B,T]; returns the token loss [B,T] and the metrics ess,
    kl, capped. The sums run over the micro-batch of all ranks, in float64, with one all-reduce of fixed size: every
    rank must compute the loss equally often in a step. That is the released code; the paper speaks of the batch, which
    is this with one micro-batch per update. A small micro-batch inflates the ESS, which is at least 1/n. Sums that are
    not finite give ESS 1. Rows of advantage 0 still feel the pull.

    With `proximal` the mixture variant P4O: the cap is the smaller of the ESS against the behaviour and against the
    proximal policy, and the pull goes to their mixture (w_b pi_b + w_p pi_p) / (w_b + w_p) with w = 1 - ESS.

    The cap goes back to P3O (arXiv 1905.01756). `level="sequence"` is a helper of the release that it does not use.
    Rows cut short by a selector count with the tokens they have left.
    """

    paper = "Batch-adaptive policy objective by effective sample size, arXiv 2605.12380"
    scope = "micro"
    fixes = {"ratio": None}

    level: Literal["batch", "sequence"] = param(
        "batch", doc="tokens of one ESS: all, or those of a row; the code's all"
    )
    kl_clamp: float = param(10.0, gt=0, doc="bound on |d| in the exponential of k3, nats; the code's 10")
    eps: float = param(1e-8, ge=0, doc="added to the sum of squares; the code's 1e-8")
    log_clamp: float | None = param(None, gt=0, doc="bound on |d| in nats; None: none, an infinite ratio gives ESS 1")
    proximal: Literal["logp_old", "logp_prox"] | None = param(None, doc="proximal policy of the mixture; None: P3O")
    denominator: Literal["logp_rollout", "logp_old", "logp_behavior"] = param(
        "logp_rollout", doc="behaviour policy: the log-probs stored at rollout"
    )

    @property
    def requires(self) -> frozenset[str]:
        return frozenset({self.denominator} if self.proximal is None else {self.denominator, self.proximal})

    def __call__(self, terms: PolicyTerms) -> Any:
        mask = terms.mask
        references: list[str] = [self.denominator] if self.proximal is None else [self.denominator, self.proximal]
        drifts = self.drifts(terms, references)
        ess = torch.stack([d.ess for d in drifts]).amin(0)
        rho = self.capped(drifts[0], ess, mask)
        kl = self.divergence(drifts[0].log_ratio if len(drifts) == 1 else self.mixed(drifts), mask)
        pull = 1 - ess
        if len(drifts) > 1:
            pull = masked(pull, pull > SMALLEST_PULL)
        loss = masked_policy_gradient(terms, rho, mask) + pull * masked(kl, pull != 0)  # 0 times inf is not 0
        return loss, {
            "ess": ess.mean(),
            "kl": masked_mean(kl.detach(), mask),
            "capped": masked_mean((drifts[0].ratio > ess).to(rho.dtype), mask),
        }

    def drifts(self, terms: PolicyTerms, references: list[str]) -> list[Drift]:
        """Drift and effective sample size against each reference; one all-reduce for all of them."""
        log_ratios = [terms.log_ratio(name, self.log_clamp) for name in references]
        ratios = [d.detach().exp() for d in log_ratios]
        mask, dim = terms.mask, (1 if self.level == "sequence" else None)
        wide = [masked(r, mask).double() for r in ratios]
        first = torch.stack([r.sum(dim) for r in wide])
        second = torch.stack([r.square().sum(dim) for r in wide])
        n = mask.sum(dim).double().expand_as(first)
        if self.level == "batch":
            first, second, n = terms.all_reduce(torch.stack([first, second, n]))
        ess = first.square() / (n * (second + self.eps))
        if self.level == "sequence":
            ess = ess.clamp(0, 1)
        ess = torch.where((n > 0) & torch.isfinite(first) & torch.isfinite(second), ess, torch.ones_like(ess))
        shape = (-1, 1) if self.level == "sequence" else (1, 1)
        return [Drift(d, r, e.to(r.dtype).reshape(shape)) for d, r, e in zip(log_ratios, ratios, ess, strict=True)]

    def capped(self, drift: Drift, ess: Tensor, mask: Tensor) -> Tensor:
        """min(r, ESS) [B,T], 0 where masked."""
        return masked(torch.minimum(drift.ratio, ess.expand_as(drift.ratio)), mask)

    def divergence(self, log_ratio: Tensor, mask: Tensor) -> Tensor:
        """k3 estimate of the KL [B,T], 0 where masked, with gradient."""
        return masked(log_ratio + (-log_ratio).clamp(-self.kl_clamp, self.kl_clamp).exp() - 1, mask)

    def mixed(self, drifts: list[Drift]) -> Tensor:
        """log ratio of the policy over the mixture of the references, each weighing 1 - ESS."""
        shares = [(1 - d.ess).clamp(min=0) for d in drifts]
        total = torch.stack(shares).sum(0)
        safe = torch.where(total > 0, total, torch.ones_like(total))
        logs = [torch.where(total > 0, s / safe, torch.full_like(s, 1 / len(shares))).log() for s in shares]
        return -torch.stack([log - d.log_ratio for log, d in zip(logs, drifts, strict=True)]).logsumexp(0)
