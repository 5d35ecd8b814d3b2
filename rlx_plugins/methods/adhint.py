"""ADHint as one name: what hinted rollouts are worth, and which tokens of the hint they train."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..advantages.adhint import ADHint as ADHintAdvantage
from ..core.kinds import Method
from ..core.params import param
from ..core.registry import register
from ..selectors.adhint import ADHint as ADHintSelector


@register("method", "adhint")
@dataclass
class ADHint(Method):
    """Expands to advantage=adhint and selector=adhint; the hinted rollouts come from the `hint` named beside it.

    The parameters are those of the two parts, which check them; `rlx show advantage adhint` and
    `rlx show selector adhint` say what each means.
    """

    paper = "ADHint: Adaptive Hints with Difficulty Priors for Reinforcement Learning, arXiv 2512.13095"

    gap_weight: float = param(ADHintAdvantage.gap_weight, doc="advantage")
    pool: str = param(ADHintAdvantage.pool, doc="advantage")
    max_reward: float = param(ADHintAdvantage.max_reward, doc="advantage")
    tolerance: float = param(ADHintSelector.tolerance, doc="selector")
    modulate: bool = param(ADHintSelector.modulate, doc="selector")
    preserve: bool = param(ADHintSelector.preserve, doc="selector")

    def expand(self) -> dict[str, Any]:
        own = self.params()
        advantage, selector = ("gap_weight", "pool", "max_reward"), ("tolerance", "modulate", "preserve")
        return {
            "advantage": {"name": "adhint", **{name: own[name] for name in advantage}},
            "selector": {"name": "adhint", **{name: own[name] for name in selector}},
        }
