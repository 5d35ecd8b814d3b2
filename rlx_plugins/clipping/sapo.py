"""SAPO: a sigmoid gate in place of the hard clip."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..core.kinds import Clip
from ..core.params import param
from ..core.registry import register
from ..core.terms import PolicyTerms


@register("clip", "sapo")
@dataclass
class SAPO(Clip):
    """The further a token's ratio is from 1, the less it pushes, smoothly instead of all or nothing. Tokens of negative
    advantage fade faster.

    L = -A (4 / tau) sigmoid(tau (r - 1)), tau = tau_pos where A > 0, else tau_neg. The slope at r = 1 is 1.

    Reads ratio and advantages [B,T]; returns the token loss [B,T], averaged within and then over rows.
    """

    paper = "Soft Adaptive Policy Optimization, arXiv 2511.20347"
    fixes = {"aggregate": "seq_mean_token_mean"}

    tau_pos: float = param(1.0, gt=0, doc="steepness of the gate for positive advantages; the paper's 1.0")
    tau_neg: float = param(1.05, gt=0, doc="steepness for the others; the paper's 1.05")

    def __call__(self, terms: PolicyTerms) -> Tensor:
        ratio, adv = terms.ratio, terms.advantages
        tau = torch.where(adv > 0, torch.full_like(ratio, self.tau_pos), torch.full_like(ratio, self.tau_neg))
        return -adv * torch.sigmoid(tau * (ratio - 1)) * (4 / tau)
