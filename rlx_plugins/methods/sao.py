"""SAO as one name: a critic's baseline for single rollouts, and a direct ratio to the engine's probabilities."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from ..core.kinds import Method
from ..core.params import param
from ..core.registry import register


@register("method", "sao")
@dataclass
class SAOMethod(Method):
    """`advantage: sao` estimates advantages from the host's critic, one rollout per prompt; `clip: sao` drops tokens
    whose ratio to the engine's log-probs leaves a wide band. The loss is the mean over tokens, dropped ones included.
    """

    paper = "SAO, arXiv 2607.07508"

    lambda_scale: float = param(1.5, gt=0, doc="how fast the actor's lambda nears 1 with length; the paper's alpha")
    eps_low: float = param(0.3, ge=0, doc="the band starts at 1 - eps_low; the paper's 0.3 (coding agent 0.8)")
    eps_high: float = param(5.0, ge=0, doc="the band ends at 1 + eps_high; the paper's 5.0 (coding agent 3.0)")
    denominator: Literal["logp_rollout", "logp_old"] = param("logp_rollout", doc="policy the ratio divides by")

    def expand(self) -> dict[str, Any]:
        clip = ("eps_low", "eps_high", "denominator")
        return {
            "advantage": {"name": "sao", "lambda_scale": self.lambda_scale},
            "clip": {"name": "sao", **{name: getattr(self, name) for name in clip}},
            "aggregate": "token_mean",
        }
