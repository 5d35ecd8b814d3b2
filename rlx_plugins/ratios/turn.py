"""The importance ratio of a whole turn: the geometric mean of its token ratios."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ..core.kinds import Ratio
from ..core.params import param
from ..core.registry import register
from ..core.terms import PolicyTerms, masked


@register("ratio", "turn")
@dataclass
class TurnRatio(Ratio):
    """All tokens of an agent's turn share one ratio, so that the clip keeps or drops the turn as one action.

    rho = exp( clamp( mean over the turn's tokens of logp_new - logp_denominator, +-log_clamp ) ) [B,T]; 1, without
    gradient, where masked or outside every turn. The gradient is that of the mean: d rho / d logp_u = rho / n for each
    of the turn's n tokens u.

    Reads turn_ids [B,T] (-1: none); any integers, tokens of a turn need not be adjacent.
    """

    paper = "A2TGPO: agentic turn-group policy optimisation, arXiv 2605.06200"
    needs_full_rows = True

    denominator: Literal["logp_old", "logp_behavior", "logp_rollout"] = param("logp_old", doc="policy divided by")
    log_clamp: float = param(20.0, gt=0, doc="bound on |mean log ratio| in nats; the hosts' 20")

    @property
    def requires(self) -> frozenset[str]:
        return frozenset({self.denominator, "turn_ids"})

    def __call__(self, terms: PolicyTerms) -> Tensor:
        live = terms.mask & (terms.batch.turn_ids >= 0)
        log_ratio = terms.log_ratio(self.denominator)
        mean = turn_mean(log_ratio, terms.batch.turn_ids, live)
        return mean.clamp(-self.log_clamp, self.log_clamp).exp().to(log_ratio.dtype)


def turn_mean(x: Tensor, turn_ids: Tensor, live: Tensor) -> Tensor:
    """[B,T] mean of `x` over the tokens of `live` with the same turn id in the same row; 0 at the others.

    At least float32, so that a long turn's sum is exact enough.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    ordered, order = turn_ids.sort(dim=1)
    begins = torch.zeros_like(live)
    begins[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
    number = torch.zeros_like(turn_ids).scatter(1, order, begins.cumsum(1))
    empty = torch.zeros(x.shape, dtype=wide, device=x.device)
    total = empty.scatter_add(1, number, masked(x, live).to(wide))
    n = empty.scatter_add(1, number, live.to(wide))
    return masked((total / n.clamp(min=1)).gather(1, number), live)
