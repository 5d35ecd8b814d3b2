"""PPO-EWMA as one name: the averaged policy's band, the ratio over it, and PPO's clip."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from ..core.kinds import Method
from ..core.params import param
from ..core.registry import register


@register("method", "ppo_ewma")
@dataclass
class PPOEWMAMethod(Method):
    """`correction: ppo_ewma` masks tokens outside the band and watches how many are active, `ratio: token` divides by
    logp_prox, `clip: ppo` has the asymmetric range. The window W is the host's: TRL's prox_decay = W / (W + 2).
    """

    paper = "Missing old logits in asynchronous RL, arXiv 2605.12070"

    weight: Literal["mask", "weight"] = param("mask", doc="what a token inside the band weighs: 1, or r_d")
    d_low: float = param(0.5, ge=0, doc="smallest pi_prox / pi_rollout; reconstructed")
    d_high: float = param(2.0, gt=0, doc="largest pi_prox / pi_rollout; reconstructed")
    min_active: float = param(0.9, ge=0, le=1, doc="active share below which the average starts anew; the paper's tau")
    eps_low: float = param(0.2, ge=0, doc="the range starts at 1 - eps_low; the paper's 0.2")
    eps_high: float = param(0.28, ge=0, doc="the range ends at 1 + eps_high; the paper's 0.28")

    def expand(self) -> dict[str, Any]:
        return {
            "correction": {"name": "ppo_ewma", **self.params()},
            "ratio": {"name": "token", "denominator": "logp_prox"},
            "clip": {"name": "ppo", "eps_low": self.eps_low, "eps_high": self.eps_high},
        }
