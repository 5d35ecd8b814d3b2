"""PNPO's prefix-normalised ratio: the geometric mean of the token ratios up to and including the token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ..core.kinds import Ratio
from ..core.params import param
from ..core.registry import register
from ..core.terms import PolicyTerms, masked


@register("ratio", "pnpo")
@dataclass
class PNPO(Ratio):
    """Token t gets the geometric mean of all token ratios of its row up to t: the first token's is PPO's ratio, the
    last one's is GSPO's, and none depends on later tokens.

        w_t = exp( (1/t) sum_{k<=t} clamp(logp_new_k - logp_denominator_k, +-log_clamp) ),  t counting model tokens

    [B,T], 1 where masked; masked tokens inside a row (tool output) enter neither the sum nor t. The running sum is at
    least float32. `grad_mode="token"` keeps the value of w_t and sends its gradient to the token's own log-prob, as
    GSPO does in verl; "prefix" differentiates the mean, so early tokens collect the terms of all later ones. A log-prob
    that is infinite receives no gradient.

    The paper's clip range and gradient path are not known: PPO's clip with 0.2 and "token" stand in (`method: pnpo`).
    """

    paper = "PNPO: prefix-normalised policy optimisation, arXiv 2608.01418"

    denominator: Literal["logp_old", "logp_behavior", "logp_rollout"] = param("logp_old", doc="policy divided by")
    grad_mode: Literal["token", "prefix"] = param("token", doc="where the gradient of w_t goes")
    log_clamp: float = param(20.0, gt=0, doc="bound on a token's |log ratio| in nats, before the sum; the hosts' 20")

    @property
    def requires(self) -> frozenset[str]:
        return frozenset({self.denominator})

    def __call__(self, terms: PolicyTerms) -> Tensor:
        mask = terms.mask
        log_ratio = terms.log_ratio(self.denominator, self.log_clamp)
        wide = log_ratio.to(torch.promote_types(log_ratio.dtype, torch.float32))
        weight = (wide.cumsum(1) / mask.cumsum(1).clamp(min=1)).exp()
        if self.grad_mode == "token":
            own = masked(terms.logp_new, mask & torch.isfinite(terms.logp_new))
            weight = weight.detach() * (own - own.detach()).exp()
        return torch.where(mask, weight, torch.ones_like(weight)).to(log_ratio.dtype)
