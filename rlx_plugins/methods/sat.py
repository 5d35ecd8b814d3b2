"""SAT as one name: ratio and drift over the policy that generated."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from ..core.kinds import Method
from ..core.params import param
from ..core.registry import register


@register("method", "sat")
@dataclass
class SATMethod(Method):
    """`clip: sat` and the ratio of its level, both over `denominator`. At `level="sequence"` the loss is GSPO's mean
    over rows of the row means.

    Where the host already stores the engine's log-probs as logp_old (verl's bypass mode), `denominator=logp_old`.
    """

    paper = "SAT: a staleness-adaptive trust region, arXiv 2607.18722"

    eps_low: float = param(0.2, ge=0, doc="radius below 1 of a token that is not gated; the paper's 0.2")
    eps_high: float = param(0.2, ge=0, doc="radius above 1 of a token that is not gated; the paper's 0.2")
    quantile: float = param(0.9, gt=0, le=1, doc="share of tokens never gated; the paper's 0.9")
    hill: float = param(2.0, gt=0, doc="exponent of the Hill kernel; the paper's 2")
    level: Literal["token", "sequence"] = param("token", doc="drift of the token, or mean drift of its row (GSPO)")
    denominator: Literal["logp_rollout", "logp_old", "logp_behavior"] = param("logp_rollout", doc="policy divided by")

    def expand(self) -> dict[str, Any]:
        kinds: dict[str, Any] = {
            "ratio": {"name": self.level, "denominator": self.denominator},
            "clip": {"name": "sat", **self.params()},
        }
        if self.level == "sequence":
            kinds["ratio"]["log_max"] = 20.0
            kinds["aggregate"] = "seq_mean_token_mean"
        return kinds
