"""EHPO as one name: branches where thinking turns slow, and a reward for the mix that fits the prompt."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..allocation.ehpo import EHPO as EHPOAllocator
from ..core.kinds import Method
from ..core.params import param
from ..core.registry import register
from ..rewards.ehpo import EHPO as EHPOReward
from ._parts import spec


@register("method", "ehpo")
@dataclass
class EHPO(Method):
    """Expands to allocator=ehpo and reward=ehpo; advantages are GRPO's of the group, branches included.

    The parameters are those of the two parts, which check them; `rlx show allocator ehpo` and `rlx show reward ehpo`
    say what each means.
    """

    paper = EHPOAllocator.paper

    easy: tuple[int, ...] = param(doc="allocator; token ids that open an easy unit")
    hard: tuple[int, ...] = param(doc="allocator; token ids that open a hard unit")
    total_rollouts: int = param(EHPOAllocator.total_rollouts, doc="allocator")
    first_wave: int = param(EHPOAllocator.first_wave, doc="allocator")
    base: float = param(EHPOAllocator.base, doc="allocator")
    scale: float = param(EHPOAllocator.scale, doc="allocator")
    branches: int = param(EHPOAllocator.branches, doc="allocator")
    max_forks: int = param(EHPOAllocator.max_forks, doc="allocator")
    window: int = param(EHPOAllocator.window, doc="allocator; tokens")
    vocabulary_size: int = param(EHPOAllocator.vocabulary_size, doc="allocator")
    floor: float = param(EHPOReward.floor, doc="reward")
    by: str = param(EHPOReward.by, doc="reward")

    def expand(self) -> dict[str, Any]:
        return {"allocator": spec(self, EHPOAllocator), "reward": spec(self, EHPOReward), "advantage": "grpo"}
