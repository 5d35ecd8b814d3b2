"""A2TGPO's clip: informative turns may move further than uninformative ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from ..core.kinds import Clip
from ..core.params import param
from ..core.registry import register
from ..core.terms import PolicyTerms, clip_fraction, clipped_surrogate, masked_mean


@register("clip", "a2tgpo")
@dataclass
class A2TGPOClip(Clip):
    """PPO's clip with a half-width that grows with the information gain of the token's turn, on a ratio that all tokens
    of the turn share.

    c = 1 + gain_scale tanh(norm_ig / 2)   (= 1 + beta (2 sigmoid(norm_ig) - 1), within 1 +- gain_scale);
    L = max(-A r, -A clip(r, 1 - eps_low c, 1 + eps_high c)); for A < 0 with a dual clip additionally L <= -A dual_clip.

    Reads ratio, advantages and norm_ig [B,T] (detached; `advantage: a2tgpo` makes it; 0 or NaN: c = 1); returns the
    token loss [B,T]. It fixes the ratio of its level, `ratio: turn` unless level="token".
    """

    paper = "A2TGPO: agentic turn-group policy optimisation, arXiv 2605.06200"
    requires = frozenset({"norm_ig"})

    eps_low: float = param(0.2, ge=0, lt=1, doc="the range of c = 1 starts at 1 - eps_low; both hosts' 0.2")
    eps_high: float = param(0.2, ge=0, doc="the range of c = 1 ends at 1 + eps_high; both hosts' 0.2")
    gain_scale: float = param(0.3, ge=0, lt=1, doc="largest relative change of the half-width; the code's beta")
    level: Literal["turn", "token"] = param("turn", doc="level of the ratio; the paper's turn")
    dual_clip: float | None = param(None, gt=1, doc="bound for negative advantages; verl's 3.0; None: off")

    @property
    def fixes(self) -> dict[str, str]:
        return {"ratio": self.level}

    def __call__(self, terms: PolicyTerms) -> Any:
        scale = self.scale(terms.batch.norm_ig).to(terms.ratio.dtype)
        low, high = 1 - self.eps_low * scale, 1 + self.eps_high * scale
        loss = clipped_surrogate(terms.ratio, terms.advantages, low, high, self.dual_clip)
        return loss, {
            "clipped": clip_fraction(terms.ratio, terms.advantages, low, high, terms.mask),
            "scale": masked_mean(scale, terms.mask),
        }

    def scale(self, norm_ig: Tensor) -> Tensor:
        """c, in the shape of `norm_ig`."""
        return 1 + self.gain_scale * (torch.nan_to_num(norm_ig, nan=0.0) / 2).tanh()
