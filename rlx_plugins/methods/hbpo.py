"""HBPO as one name: a reward that depends on the token budget, and the advantage that compares budgets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..advantages.hbpo import HBPO as HBPOAdvantage
from ..core.kinds import Method
from ..core.params import param
from ..core.registry import register
from ..rewards.hbpo import HBPO as HBPOReward


@register("method", "hbpo")
@dataclass
class HBPO(Method):
    """Expands to reward=hbpo and advantage=hbpo. Both read the token budget each rollout was told, the column `budget`.

    The parameters are those of the two parts, which check them; `rlx show reward hbpo` and `rlx show advantage hbpo`
    say what each means.
    """

    paper = "Hierarchical Budget Policy Optimization for Adaptive Reasoning, arXiv 2507.15844"

    scale: float = param(HBPOReward.scale, doc="reward")
    overrun_coef: float = param(HBPOReward.overrun_coef, doc="reward")
    max_length: int = param(HBPOReward.max_length, doc="reward; tokens")
    success_threshold: float = param(HBPOReward.success_threshold, doc="reward")
    use_intra: bool = param(HBPOAdvantage.use_intra, doc="advantage")
    eps: float = param(HBPOAdvantage.eps, doc="advantage")

    def expand(self) -> dict[str, Any]:
        own = self.params()
        reward, advantage = ("scale", "overrun_coef", "max_length", "success_threshold"), ("use_intra", "eps")
        return {
            "reward": {"name": "hbpo", **{name: own[name] for name in reward}},
            "advantage": {"name": "hbpo", **{name: own[name] for name in advantage}},
        }
