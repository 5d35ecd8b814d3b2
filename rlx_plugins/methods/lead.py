"""LEAD: an efficiency reward relative to the group's own correct answers, and the advantage that mixes it in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..advantages.lead import LEAD as LeadAdvantage
from ..core.kinds import Method
from ..core.params import param, param_fields
from ..core.registry import register
from ..rewards.lead import LEAD as LeadReward


@register("method", "lead")
@dataclass
class LEAD(Method):
    """Expands to reward=lead, which measures efficiency against each prompt's own correct answers, and advantage=lead.

    The parameters are those of the two parts, which check them; `rlx show reward lead` and `rlx show advantage lead`
    say what each means.
    """

    paper = "LEAD: Length-Efficient Adaptive and Dynamic Reasoning for Large Language Models, arXiv 2605.09806"

    mode: str = param(LeadReward.mode, doc="reward")
    aggregator: str = param(LeadReward.aggregator, doc="reward")
    min_target: float = param(LeadReward.min_target, doc="reward; tokens")
    max_target: float = param(LeadReward.max_target, doc="reward; tokens")
    short_guard: float = param(LeadReward.short_guard, doc="reward; tokens")
    success_threshold: float = param(LeadReward.success_threshold, doc="reward")
    potential_exponent: float = param(LeadAdvantage.potential_exponent, doc="advantage")
    decay: float = param(LeadAdvantage.decay, doc="advantage")
    min_correct_weight: float = param(LeadAdvantage.min_correct_weight, doc="advantage")
    static_correct_weight: float | None = param(LeadAdvantage.static_correct_weight, doc="advantage")
    whiten: bool = param(LeadAdvantage.whiten, doc="advantage")
    eps: float = param(LeadAdvantage.eps, doc="advantage")

    def expand(self) -> dict[str, Any]:
        given = self.params()
        parts = {"reward": LeadReward, "advantage": LeadAdvantage}
        return {
            kind: {"name": "lead", **{name: given[name] for name in param_fields(part) if name in given}}
            for kind, part in parts.items()
        }
