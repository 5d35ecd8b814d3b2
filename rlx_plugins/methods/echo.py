"""ECHO as one name: advantages shaped by uncertainty, and a clip range that follows the confidence of the end."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..advantages._base import Base
from ..advantages._confidence import Confidence
from ..core.kinds import Method
from ..core.params import param
from ..core.registry import register


@register("method", "echo")
@dataclass
class ECHOMethod(Method):
    """`advantage: echo` on top of `base`, and `clip: echo`, both from the same confidence; mean over tokens. The
    rollout side of the paper, branching and pruning by confidence, is a pruner of its own.
    """

    paper = "Entropy Confidence Hybrid Group Relative Policy Optimization, arXiv 2602.02150"

    base: Base = param("grpo", doc="estimator underneath; the paper's grpo")
    confidence: Confidence = param("column", doc="top-5 mass from the column confidence, or the sampled token's")
    score_coef: float = param(0.1, ge=0, doc="how much uncertainty scales an advantage; the code's mult_coeff")
    tail_window: int = param(16, doc="model tokens at the end of the row; the code's 16; 0 or less: all")
    eps_min: float = param(0.05, gt=0, doc="half-width at an infinitely confident end; the code's 0.05")
    eps_max: float = param(0.2, gt=0, doc="half-width at an infinitely unsure end; the code's 0.2")

    def expand(self) -> dict[str, Any]:
        own = self.params()
        shared = {"confidence": self.confidence}
        return {
            "advantage": {"name": "echo", **{name: own[name] for name in ("base", "score_coef")}, **shared},
            "clip": {"name": "echo", **{name: own[name] for name in ("tail_window", "eps_min", "eps_max")}, **shared},
            "aggregate": "token_mean",
        }
