"""XRPO as one name: rollouts where the reward is least certain, examples where all fail, credit for the unlikely."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..advantages.xrpo import XRPO as XRPOAdvantage
from ..allocation.xrpo import XRPO as XRPOAllocator
from ..core.kinds import Method
from ..core.params import param
from ..core.registry import register
from ..hints.xrpo import XRPO as XRPOHint
from ._parts import spec


@register("method", "xrpo")
@dataclass
class XRPO(Method):
    """Expands to allocator=xrpo, to hint=xrpo, which seeds the rollouts the allocator adds to prompts that failed (and
    adds none itself), and to advantage=xrpo on GRPO's.

    The parameters are those of the parts, which check them; `rlx show allocator xrpo`, `rlx show hint xrpo` and
    `rlx show advantage xrpo` say what each means.
    """

    paper = XRPOAllocator.paper

    first_wave: int = param(XRPOAllocator.first_wave, doc="allocator")
    rounds: int = param(XRPOAllocator.rounds, doc="allocator")
    total_rollouts: int | None = param(XRPOAllocator.total_rollouts, doc="allocator")
    max_per_prompt: int | None = param(XRPOAllocator.max_per_prompt, doc="allocator")
    outside: float = param(XRPOAllocator.outside, doc="allocator")
    bonus_coef: float = param(XRPOAllocator.bonus_coef, doc="allocator")
    column: str = param(XRPOHint.column, doc="hint; dataset column")
    examples: int = param(XRPOHint.examples, doc="hint")
    min_similarity: float = param(XRPOHint.min_similarity, doc="hint")
    max_example_tokens: int = param(XRPOHint.max_example_tokens, doc="hint; tokens")
    budget_tokens: int = param(XRPOHint.budget_tokens, doc="hint; tokens")
    answer_tokens: int = param(XRPOHint.answer_tokens, doc="hint; tokens")
    max_prompt_tokens: int | None = param(XRPOHint.max_prompt_tokens, doc="hint; tokens")
    success_threshold: float = param(XRPOHint.success_threshold, doc="hint")
    novelty_weight: float = param(XRPOAdvantage.novelty_weight, doc="advantage")
    max_bonus: float = param(XRPOAdvantage.max_bonus, doc="advantage")

    def expand(self) -> dict[str, Any]:
        return {
            "allocator": spec(self, XRPOAllocator),
            "hint": spec(self, XRPOHint, extra=0),
            "advantage": spec(self, XRPOAdvantage),
        }
