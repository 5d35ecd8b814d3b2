"""ECHO's clip: a response that ends confidently may move less."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..advantages._confidence import Confidence, token_confidence
from ..core.batch import RolloutBatch
from ..core.errors import ConfigError
from ..core.kinds import Clip
from ..core.params import param
from ..core.registry import register
from ..core.segments import wide
from ..core.terms import PolicyTerms, clip_fraction, clipped_surrogate, masked_mean


class Range(NamedTuple):
    """Per row [B]: confidence of the last tokens, and the clip half-width it gives."""

    tail_confidence: Tensor
    clip_epsilon: Tensor


@register("clip", "echo")
@dataclass
class ECHOClip(Clip):
    """One symmetric clip range per response, from the mean confidence of its last tokens: a confident end may be
    overfitted to its pseudo-label already and is held tighter, an unsure one keeps a wide range.

    tail_i = mean of clip(C, 0, 1) over the last min(tail_window, n_i) model tokens of the row;
    eps_i = eps_min + (eps_max - eps_min) sigmoid(slope (1 - tail_i));
    L = max(-A r, -A clip(r, 1 - eps_i, 1 + eps_i)), for A < 0 additionally L <= -A dual_clip.

    Reads ratio and advantages [B,T], and the confidence C [B,T] of the policy that starts the step (see
    `advantage: echo` for the column and its substitute "sampled"; NaN counts as 0); returns the token loss [B,T].
    Tool output between model tokens is passed over: the window is one of model tokens, not of positions as in the
    released code, which assumes a mask without gaps.

    tail <= 1, so eps_i never falls below the middle of eps_min and eps_max.
    """

    paper = "Entropy Confidence Hybrid Group Relative Policy Optimization, arXiv 2602.02150"
    fixes = {"ratio": "token"}
    needs_full_rows = True

    tail_window: int = param(16, doc="model tokens at the end of the row; the code's 16; 0 or less: all")
    eps_min: float = param(0.05, gt=0, doc="half-width at an infinitely confident end; the code's 0.05")
    eps_max: float = param(0.2, gt=0, doc="half-width at an infinitely unsure end; the code's 0.2")
    slope: float = param(4.0, gt=0, doc="how sharply the range follows the confidence; the code's kappa")
    dual_clip: float | None = param(3.0, gt=1, doc="bound for negative advantages; verl's 3.0; None: off")
    confidence: Confidence = param("column", doc="top-5 mass from the column confidence, or the sampled token's")

    def check(self) -> None:
        if self.eps_min > self.eps_max:
            raise ConfigError(f"clip echo.eps_min: must be <= eps_max ({self.eps_max:g}), got {self.eps_min:g}")

    @property
    def requires(self) -> frozenset[str]:
        return frozenset({"confidence" if self.confidence == "column" else "logp_old"})

    def __call__(self, terms: PolicyTerms) -> Any:
        width = self.range(terms.batch).clip_epsilon.to(terms.ratio.dtype)
        low, high = 1 - width[:, None], 1 + width[:, None]
        loss = clipped_surrogate(terms.ratio, terms.advantages, low, high, self.dual_clip)
        return loss, {
            "clipped": clip_fraction(terms.ratio, terms.advantages, low, high, terms.mask),
            "clip_epsilon": masked_mean(width, terms.mask.any(1)),
        }

    def range(self, batch: RolloutBatch) -> Range:
        """Tail confidence and half-width of every row."""
        mask = batch.response_mask
        confidence = wide(token_confidence(batch, self.confidence))
        before_tail = batch.lengths[:, None] - self.tail_window if self.tail_window > 0 else 0
        tail = mask & (mask.cumsum(1, dtype=torch.int32) > before_tail)
        mean = masked_mean(confidence, tail, dim=1)
        return Range(mean, self.eps_min + (self.eps_max - self.eps_min) * torch.sigmoid(self.slope * (1 - mean)))
