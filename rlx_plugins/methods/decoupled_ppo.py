"""Decoupled PPO as one name: weight, ratio and clip with a proximal policy that is scored, or interpolated."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from ..core.kinds import Method
from ..core.params import param
from ..core.registry import register
from ..corrections.decoupled_ppo import CapMode


@register("method", "decoupled_ppo")
@dataclass
class DecoupledPPOMethod(Method):
    """`proximal="scored"`: logp_old is the proximal policy's; `correction: decoupled_ppo` weighs by its ratio over the
    engine's, and PPO clips the ratio over logp_old. "interpolated": `clip: decoupled_ppo` makes do without logp_old.
    """

    paper = "AReaL: A Large-Scale Asynchronous Reinforcement Learning System for Language Reasoning, arXiv 2505.24298"

    proximal: Literal["scored", "interpolated"] = param("scored", doc="where the proximal log-probs come from")
    eps_low: float = param(0.2, ge=0, doc="the range starts at 1 - eps_low; AReaL's 0.2")
    eps_high: float = param(0.2, ge=0, doc="the range ends at 1 + eps_high; AReaL's 0.2")
    dual_clip: float | None = param(None, gt=1, doc="bound for negative advantages; None: off")
    cap: float | None = param(None, gt=0, doc="largest weight; AReaL's legacy default 5; None: no bound")
    cap_mode: CapMode = param("mask", doc="a token above the cap: weight 0 (AReaL's mask), or the cap (its clamp)")

    def expand(self) -> dict[str, Any]:
        cap = {"cap": self.cap, "cap_mode": self.cap_mode}
        bounds = {"eps_low": self.eps_low, "eps_high": self.eps_high, "dual_clip": self.dual_clip}
        if self.proximal == "interpolated":
            return {"clip": {"name": "decoupled_ppo", **bounds, **cap}}
        return {
            "correction": {"name": "decoupled_ppo", **cap},
            "ratio": {"name": "token", "denominator": "logp_old"},
            "clip": {"name": "ppo", **bounds},
        }
