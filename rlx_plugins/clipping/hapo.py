"""HAPO: a clip range that widens on one side, by the token's entropy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from ..advantages._entropy_score import adaptive_range, entropy_score
from ..core.kinds import Clip
from ..core.params import param
from ..core.registry import register
from ..core.terms import PolicyTerms, clip_fraction, clipped_surrogate


@register("clip", "hapo")
@dataclass
class HAPO(Clip):
    """PPO's clip with a range of its own for every token: confident tokens may lose probability faster, which cuts
    noise, and uncertain ones may gain it faster, which explores.

    With the entropy score h [B,T] in [-1, 1]:

        el = eps_low (1 + alpha max(-h, 0)),   eh = eps_high (1 + alpha max(h, 0))
        L = max(-A r, -A clip(r, 1 - el, 1 + eh)); for A < 0 additionally L <= -A dual_clip

    Reads ratio and advantages [B,T] and the column entropy_score [B,T], which advantage=hapo makes (over any other
    estimator with its `base`); `method: hapo` sets up both. Returns the token loss [B,T] and the share of clipped
    tokens. A score that is not a number counts as 0. At h = 0 or alpha = 0 it is PPO's clip.

    `statistics="micro"` scores the current forward's entropies within each micro-batch, as the released code does; the
    paper's score is signed, the code's is not (`signed=False`).
    """

    paper = "Heterogeneous Adaptive Policy Optimization, arXiv 2509.16591"

    eps_low: float = param(0.2, gt=0, lt=1, doc="the range starts at 1 - eps_low where h >= 0; code")
    eps_high: float = param(0.2, gt=0, lt=1, doc="the range ends at 1 + eps_high where h <= 0; code")
    alpha: float = param(1.0, ge=0, doc="how far a side widens with |h|; keep eps_low (1 + alpha) below 1; code")
    dual_clip: float = param(10.0, gt=1, doc="bound for negative advantages; code's clip_ratio_c")
    statistics: Literal["batch", "micro"] = param("batch", doc="whose entropies make the score; ours, code: micro")
    quantile: float = param(0.8, ge=0, le=1, doc="micro: log-entropy at which the score is 0; the code's rho")
    signed: bool = param(True, doc="micro: False: the score's lower side positive too; released code")

    @property
    def requires(self) -> frozenset[str]:
        return frozenset({"entropy" if self.statistics == "micro" else "entropy_score"})

    @property
    def scope(self) -> str:  # type: ignore[override]
        return "micro" if self.statistics == "micro" else "row"

    def __call__(self, terms: PolicyTerms) -> Any:
        low, high = self.bounds(terms)
        loss = clipped_surrogate(terms.ratio, terms.advantages, 1 - low, 1 + high, self.dual_clip)
        return loss, {"clipped": clip_fraction(terms.ratio, terms.advantages, 1 - low, 1 + high, terms.mask)}

    def bounds(self, terms: PolicyTerms) -> tuple[Tensor, Tensor]:
        """(el, eh) [B,T], the distances of the range's ends from 1."""
        if self.statistics == "micro":
            score = entropy_score(terms.entropy, terms.mask, self.quantile, self.signed)
        else:
            score = torch.nan_to_num(terms.batch.entropy_score, nan=0.0).clamp(-1, 1)
        return adaptive_range(score, self.eps_low, self.eps_high, self.alpha)
