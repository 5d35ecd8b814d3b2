"""HAPO as one name: token-level advantages redistributed by entropy, and the clip range that follows it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..advantages._base import Base
from ..advantages.hapo import HAPO as HapoAdvantage
from ..clipping.hapo import HAPO as HapoClip
from ..core.kinds import Method
from ..core.params import param, param_fields
from ..core.registry import register


@register("method", "hapo")
@dataclass
class HAPO(Method):
    """Expands to advantage=hapo and clip=hapo on one entropy score, with the token-mean loss the average is made for.

    The parameters are those of the two parts, which check them; `rlx show advantage hapo` and `rlx show clip hapo` say
    what each means. The paper's sampling temperature by entropy acts in the engine and is not part of this name.
    """

    paper = "Heterogeneous Adaptive Policy Optimization, arXiv 2509.16591"

    quantile: float = param(HapoAdvantage.quantile, doc="both")
    beta: float = param(HapoAdvantage.beta, doc="advantage")
    alpha: float = param(HapoAdvantage.alpha, doc="both")
    eps_low: float = param(HapoAdvantage.eps_low, doc="both")
    eps_high: float = param(HapoAdvantage.eps_high, doc="both")
    dual_clip: float = param(HapoClip.dual_clip, doc="clip")
    guard: float = param(HapoAdvantage.guard, doc="advantage")
    eps: float = param(HapoAdvantage.eps, doc="advantage")
    signed: bool = param(HapoAdvantage.signed, doc="both")
    statistics: str = param(HapoAdvantage.statistics, doc="both")
    base: Base | None = param(HapoAdvantage.base, doc="advantage")

    def expand(self) -> dict[str, Any]:
        given = self.params()
        parts = {"advantage": HapoAdvantage, "clip": HapoClip}
        named = {
            kind: {"name": "hapo", **{name: given[name] for name in param_fields(part) if name in given}}
            for kind, part in parts.items()
        }
        return {**named, "aggregate": "token_mean"}
