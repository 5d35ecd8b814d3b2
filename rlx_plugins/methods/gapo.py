"""GAPO as one name: mean-centred rewards and an upper clip bound that follows the group's success rate."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from ..core.kinds import Method
from ..core.params import param
from ..core.registry import register


@register("method", "gapo")
@dataclass
class GAPO(Method):
    """GRPO's advantage without division by the spread, `clip: gapo_clip`, the ratio of its level and its mean.

    Sequence level (the paper's better form): GSPO's ratio, mean over rows of the row means. Token level: token ratio
    and token mean.
    """

    paper = "GAPO: group-adaptive clipping, arXiv 2609.00444"

    level: Literal["sequence", "token"] = param("sequence", doc="level of the ratio; the paper's better one: sequence")
    eps_low: float | None = param(None, ge=0, doc="narrow radius; None: the paper's 3e-3 (sequence), 0.2 (token)")
    eps_high_max: float | None = param(None, ge=0, doc="widest radius; None: the paper's 5e-3 (sequence), 0.28 (token)")
    success_threshold: float = param(0.5, doc="a rollout succeeded if its reward is above it")

    def expand(self) -> dict[str, Any]:
        ratio = {"name": "sequence", "log_max": 20.0} if self.level == "sequence" else {"name": "token"}
        return {
            "advantage": {"name": "grpo", "scale": "none"},
            "ratio": ratio,
            "clip": {"name": "gapo_clip", **self.params()},
            "aggregate": "seq_mean_token_mean" if self.level == "sequence" else "token_mean",
        }
