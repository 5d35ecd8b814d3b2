"""HBPO as one name: token budgets for a prompt's rollouts, a reward that depends on them, and their comparison."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..advantages.hbpo import HBPO as HBPOAdvantage
from ..allocation.hbpo import HBPO as HBPOAllocator
from ..core.kinds import Method
from ..core.params import param
from ..core.registry import register
from ..rewards.hbpo import HBPO as HBPOReward
from ._parts import spec


@register("method", "hbpo")
@dataclass
class HBPO(Method):
    """Expands to reward=hbpo and advantage=hbpo, which read the token budget each rollout was told, and with `prefixes`
    to allocator=hbpo, which tells it. Without them the column `budget` is given.

    The parameters are those of the parts, which check them; `rlx show allocator hbpo`, `rlx show reward hbpo` and
    `rlx show advantage hbpo` say what each means.
    """

    paper = "Hierarchical Budget Policy Optimization for Adaptive Reasoning, arXiv 2507.15844"

    prefixes: tuple[tuple[int, ...], ...] | None = param(None, doc="allocator; token ids; None: no allocator")
    budgets: tuple[int, ...] = param(HBPOAllocator.budgets, doc="allocator; tokens")
    scale: float = param(HBPOReward.scale, doc="reward")
    overrun_coef: float = param(HBPOReward.overrun_coef, doc="reward")
    max_length: int = param(HBPOReward.max_length, doc="reward; tokens")
    success_threshold: float = param(HBPOReward.success_threshold, doc="reward")
    use_intra: bool = param(HBPOAdvantage.use_intra, doc="advantage")
    eps: float = param(HBPOAdvantage.eps, doc="advantage")

    def expand(self) -> dict[str, Any]:
        parts = {"reward": spec(self, HBPOReward), "advantage": spec(self, HBPOAdvantage)}
        return parts if self.prefixes is None else {"allocator": spec(self, HBPOAllocator), **parts}
