"""V_0.5 as one name: rollouts that test a value prior, and the baseline fused from both."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..advantages.v05 import V05 as V05Advantage
from ..allocation.v05 import V05 as V05Allocator
from ..core.kinds import Method
from ..core.params import param
from ..core.registry import register
from ._parts import spec


@register("method", "v05")
@dataclass
class V05(Method):
    """Expands to allocator=v05 and advantage=v05, which read the same prior and scale of rewards.

    The parameters are those of the two parts, which check them; `rlx show allocator v05` and `rlx show advantage v05`
    say what each means.
    """

    paper = V05Allocator.paper

    prior: str = param(V05Allocator.prior, doc="both; dataset column")
    reward_min: float = param(V05Allocator.reward_min, doc="both")
    reward_max: float = param(V05Allocator.reward_max, doc="both")
    first_wave: int = param(V05Allocator.first_wave, doc="allocator")
    max_per_prompt: int = param(V05Allocator.max_per_prompt, doc="allocator")
    cost: float = param(V05Allocator.cost, doc="allocator")
    wave: int = param(V05Allocator.wave, doc="allocator")
    scale: str = param(V05Advantage.scale, doc="advantage")
    eps: float = param(V05Advantage.eps, doc="advantage")

    def expand(self) -> dict[str, Any]:
        return {"allocator": spec(self, V05Allocator), "advantage": spec(self, V05Advantage)}
