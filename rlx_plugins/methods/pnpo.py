"""PNPO as one name: its prefix-normalised ratio under PPO's clip."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from ..core.kinds import Method
from ..core.params import param
from ..core.registry import register


@register("method", "pnpo")
@dataclass
class PNPOMethod(Method):
    """`ratio: pnpo` makes the weights, `clip: ppo` clips them.

    The paper's own clip range is not known; a prefix mean shrinks like 1/t, so a range at GSPO's scale (3e-4) would be
    too tight for early tokens, while 0.2 is loose for late ones.
    """

    paper = "PNPO: prefix-normalised policy optimisation, arXiv 2608.01418"

    eps_low: float = param(0.2, ge=0, doc="the range starts at 1 - eps_low; the hosts' 0.2")
    eps_high: float = param(0.2, ge=0, doc="the range ends at 1 + eps_high; the hosts' 0.2")
    grad_mode: Literal["token", "prefix"] = param("token", doc="where the ratio's gradient goes")

    def expand(self) -> dict[str, Any]:
        return {
            "ratio": {"name": "pnpo", "grad_mode": self.grad_mode},
            "clip": {"name": "ppo", "eps_low": self.eps_low, "eps_high": self.eps_high},
        }
