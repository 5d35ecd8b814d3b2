"""ARPO as one name: forks after uncertain tool calls, and credit for the prefixes that forks share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..advantages.arpo import ARPO as ARPOAdvantage
from ..allocation.arpo import ARPO as ARPOAllocator
from ..core.kinds import Method
from ..core.params import param
from ..core.registry import register
from ._parts import spec


@register("method", "arpo")
@dataclass
class ARPO(Method):
    """Expands to allocator=arpo and to advantage=arpo on the forks it makes.

    The parameters are those of the two parts, which check them; `rlx show allocator arpo` and `rlx show advantage arpo`
    say what each means.
    """

    paper = ARPOAllocator.paper

    total_rollouts: int = param(ARPOAllocator.total_rollouts, doc="allocator")
    first_wave: int = param(ARPOAllocator.first_wave, doc="allocator")
    max_forks: int = param(ARPOAllocator.max_forks, doc="allocator")
    base: float = param(ARPOAllocator.base, doc="allocator")
    entropy_weight: float = param(ARPOAllocator.entropy_weight, doc="allocator")
    threshold: float = param(ARPOAllocator.threshold, doc="allocator")
    stochastic: bool = param(ARPOAllocator.stochastic, doc="allocator")
    measured_tokens: int = param(ARPOAllocator.measured_tokens, doc="allocator; tokens")
    vocabulary_size: int = param(ARPOAllocator.vocabulary_size, doc="allocator")
    boundary_tokens: tuple[int, ...] | None = param(ARPOAllocator.boundary_tokens, doc="allocator; token ids")
    mode: str = param(ARPOAdvantage.mode, doc="advantage")
    normalize: bool = param(ARPOAdvantage.normalize, doc="advantage")
    eps: float = param(ARPOAdvantage.eps, doc="advantage")

    def expand(self) -> dict[str, Any]:
        advantage = spec(self, ARPOAdvantage, tree="forks")
        return {"allocator": spec(self, ARPOAllocator), "advantage": advantage, "aggregate": "token_mean"}
