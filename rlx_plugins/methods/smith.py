"""SMITH as one name: its five axes, normalised apart and summed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..core.kinds import Method
from ..core.params import param
from ..core.registry import register
from ..rewards.smith import AXES


@register("method", "smith")
@dataclass
class SMITHMethod(Method):
    """`reward: smith` makes the axes of tool building and tool use; `advantage: gdpo` normalises each inside its group,
    weighs, sums, and normalises the sum over the batch, with TRL's constants.
    """

    paper = "SMITH: Schema-grounded Multi-task Iterative Tool Honing, arXiv 2608.24571"

    weights: tuple[float, float, float, float, float] = param(
        (1.0, 1.0, 0.2, 1.0, 1.0),
        ge=0,
        doc=f"of {', '.join(AXES)}; the judge's is the code's, the others reconstructed",
    )
    max_turns: int = param(5, ge=1, doc="turns at which a use is worth nothing; the code's 5")
    strict: bool = param(True, doc="one missing block, name or parameter makes the build worth nothing; the code's")
    want_calls: int = param(1, ge=0, doc="successful calls a use should make; reconstructed")
    eps: float = param(1e-4, gt=0, doc="added to the spread of a group and of the batch; TRL's")

    def expand(self) -> dict[str, Any]:
        own = {"max_turns": self.max_turns, "strict": self.strict, "want_calls": self.want_calls}
        weights = dict(zip(AXES, self.weights, strict=True))
        spread = {"eps_group": self.eps, "eps_batch": self.eps}
        return {
            "reward": {"name": "smith", **own},
            "advantage": {"name": "gdpo", "host": "trl", "weights": weights, **spread},
        }
