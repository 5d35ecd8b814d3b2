"""ADHint as one name: hints as long as prompts are hard, what hinted rollouts are worth, which hint tokens train."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..advantages.adhint import ADHint as ADHintAdvantage
from ..core.kinds import Method
from ..core.params import param
from ..core.registry import register
from ..hints.adhint import ADHint as ADHintHint
from ..selectors.adhint import ADHint as ADHintSelector
from ._parts import spec


@register("method", "adhint")
@dataclass
class ADHint(Method):
    """Expands to hint=adhint, advantage=adhint and selector=adhint.

    The parameters are those of the parts, which check them; `rlx show hint adhint`, `rlx show advantage adhint` and
    `rlx show selector adhint` say what each means.
    """

    paper = ADHintHint.paper

    column: str = param(ADHintHint.column, doc="hint; dataset column")
    hinted_rollouts: int | None = param(ADHintHint.hinted_rollouts, doc="hint")
    min_share: float = param(ADHintHint.min_share, doc="hint")
    max_share: float = param(ADHintHint.max_share, doc="hint")
    noise_width: float = param(ADHintHint.noise_width, doc="hint")
    skip_difficulty: float = param(ADHintHint.skip_difficulty, doc="hint")
    min_continuation: int = param(ADHintHint.min_continuation, doc="hint; tokens")
    max_reward: float = param(ADHintHint.max_reward, doc="hint and advantage")
    gap_weight: float = param(ADHintAdvantage.gap_weight, doc="advantage")
    pool: str = param(ADHintAdvantage.pool, doc="advantage")
    tolerance: float = param(ADHintSelector.tolerance, doc="selector")
    modulate: bool = param(ADHintSelector.modulate, doc="selector")
    preserve: bool = param(ADHintSelector.preserve, doc="selector")

    def expand(self) -> dict[str, Any]:
        return {
            "hint": spec(self, ADHintHint),
            "advantage": spec(self, ADHintAdvantage),
            "selector": spec(self, ADHintSelector),
        }
