"""EEPO as one name: a group from two policies, and a ratio that divides by the one that sampled each row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..allocation.eepo import EEPO as EEPOAllocator
from ..core.kinds import Method
from ..core.params import param
from ..core.registry import register
from ._parts import spec


@register("method", "eepo")
@dataclass
class EEPO(Method):
    """Expands to allocator=eepo, GRPO's advantage over both stages, and PPO's clip of a ratio over logp_behavior."""

    paper = EEPOAllocator.paper

    window: int = param(EEPOAllocator.window, doc="allocator; steps")
    threshold: float = param(EEPOAllocator.threshold, doc="allocator; nats")
    learning_rate: float = param(EEPOAllocator.learning_rate, doc="allocator")
    eps: float = param(EEPOAllocator.eps, doc="allocator")
    loss: str = param(EEPOAllocator.loss, doc="allocator")
    eps_low: float = param(0.2, ge=0, doc="the clip range starts at 1 - eps_low; PPO's 0.2")
    eps_high: float = param(0.2, ge=0, doc="the clip range ends at 1 + eps_high; PPO's 0.2")

    def expand(self) -> dict[str, Any]:
        return {
            "allocator": spec(self, EEPOAllocator),
            "advantage": "grpo",
            "ratio": {"name": "token", "denominator": "logp_behavior"},
            "clip": {"name": "ppo", "eps_low": self.eps_low, "eps_high": self.eps_high},
        }
