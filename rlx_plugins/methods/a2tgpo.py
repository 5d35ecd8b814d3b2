"""A2TGPO as one name: turn credit from information gain, and a clip per turn that follows it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from ..core.kinds import Method
from ..core.params import param
from ..core.registry import register


@register("method", "a2tgpo")
@dataclass
class A2TGPOMethod(Method):
    """`advantage: a2tgpo` credits turns by information gain; `ratio: turn` and `clip: a2tgpo` update them as one action
    within a range the same gain sets (column norm_ig).
    """

    paper = "A2TGPO: agentic turn-group policy optimisation, arXiv 2605.06200"

    gain_coef: float = param(0.3, ge=0, doc="weight of the accumulated information gain; the code's alpha")
    discount: float = param(1.0, gt=0, le=1, doc="per turn; the code's gamma")
    column: str | None = param(None, doc="dataset column with the gold answer; None: the column info_gain is given")
    eps_low: float = param(0.2, ge=0, lt=1, doc="the range of an average turn starts at 1 - eps_low; hosts' 0.2")
    eps_high: float = param(0.2, ge=0, doc="the range of an average turn ends at 1 + eps_high; hosts' 0.2")
    gain_scale: float = param(0.3, ge=0, lt=1, doc="largest relative change of the half-width; the code's beta")
    level: Literal["turn", "token"] = param("turn", doc="level of the ratio; the paper's turn")
    dual_clip: float | None = param(None, gt=1, doc="bound for negative advantages; verl's 3.0; None: off")

    def expand(self) -> dict[str, Any]:
        own = self.params()
        advantage = ("gain_coef", "discount", "column")
        return {
            "advantage": {"name": "a2tgpo", **{name: own[name] for name in advantage}},
            "ratio": self.level,
            "clip": {"name": "a2tgpo", **{name: value for name, value in own.items() if name not in advantage}},
            "aggregate": "token_mean",
        }
