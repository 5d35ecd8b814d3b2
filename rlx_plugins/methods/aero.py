"""AERO as one name: rescue and rejection of rollouts, and the posterior that gives groups that agree an advantage."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..advantages.aero import AERO as AEROAdvantage
from ..allocation.aero import AERO as AEROAllocator
from ..core.kinds import Method
from ..core.params import param
from ..core.registry import register
from ._parts import spec


@register("method", "aero")
@dataclass
class AERO(Method):
    """Expands to allocator=aero and advantage=aero, which share one idea of success.

    The parameters are those of the two parts, which check them; `rlx show allocator aero` and `rlx show advantage aero`
    say what each means.
    """

    paper = AEROAllocator.paper

    first_wave: int = param(AEROAllocator.first_wave, doc="allocator")
    extra: int = param(AEROAllocator.extra, doc="allocator")
    rescue_below: float = param(AEROAllocator.rescue_below, doc="allocator")
    high_from: float = param(AEROAllocator.high_from, doc="allocator")
    neg_per_pos: float = param(AEROAllocator.neg_per_pos, doc="allocator")
    total_rollouts: int | None = param(AEROAllocator.total_rollouts, doc="allocator")
    max_per_prompt: int | None = param(AEROAllocator.max_per_prompt, doc="allocator")
    n_homogeneous: int = param(AEROAllocator.n_homogeneous, doc="allocator")
    success_threshold: float = param(AEROAllocator.success_threshold, doc="both")
    prior_success: float = param(AEROAdvantage.prior_success, doc="advantage")
    prior_failure: float = param(AEROAdvantage.prior_failure, doc="advantage")
    homogeneous: str = param(AEROAdvantage.homogeneous, doc="advantage")
    stats: str = param(AEROAdvantage.stats, doc="advantage")
    eps: float = param(AEROAdvantage.eps, doc="advantage")

    def expand(self) -> dict[str, Any]:
        return {"allocator": spec(self, AEROAllocator), "advantage": spec(self, AEROAdvantage)}
