"""DART as one name: rollouts per task with a pool of successes, and training on the uncertain steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..allocation.dart import DART as DARTAllocator
from ..core.kinds import Method
from ..core.params import param
from ..core.registry import register
from ..selectors.dart import DART as DARTSelector
from ._parts import spec


@register("method", "dart")
@dataclass
class DART(Method):
    """Expands to allocator=dart and selector=dart.

    The parameters are those of the two parts, which check them; `rlx show allocator dart` and `rlx show selector dart`
    say what each means. `min_per_prompt` is 2 here, since the default advantage compares rollouts of a group.
    """

    paper = DARTAllocator.paper

    max_per_prompt: int = param(DARTAllocator.max_per_prompt, doc="allocator")
    min_per_prompt: int = param(2, doc="allocator")
    rate_threshold: float = param(DARTAllocator.rate_threshold, doc="allocator")
    window: int | None = param(DARTAllocator.window, doc="allocator")
    default_tokens: int | None = param(DARTAllocator.default_tokens, doc="allocator; tokens")
    least_tokens: int = param(DARTAllocator.least_tokens, doc="allocator; tokens")
    success_reward: float = param(DARTAllocator.success_reward, doc="allocator")
    pool_size: int | None = param(DARTAllocator.pool_size, doc="allocator")
    drop_quantile: float = param(DARTSelector.drop_quantile, doc="selector")
    cap: float | None = param(DARTSelector.cap, doc="selector")
    pool: str = param(DARTSelector.pool, doc="selector")

    def expand(self) -> dict[str, Any]:
        return {"allocator": spec(self, DARTAllocator), "selector": spec(self, DARTSelector)}
