"""CoPRIS's update as one name: partial rollouts with the log-probs of every stage, in PPO's ratio."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..core.kinds import Method
from ..core.params import param
from ..core.registry import register


@register("method", "copris_is")
@dataclass
class CoprisISMethod(Method):
    """`pruner: copris_is` scores what is left when generation ends, `pruner: april` parks it and continues it in the
    next step, and PPO's ratio divides by the log-probs so recorded.
    """

    paper = "CoPRIS: concurrency-controlled partial rollout with importance sampling, arXiv 2511.05589"

    over_sampling: float = param(2.0, ge=1, doc="groups under way per group wanted; the release's 128 / 64")
    eps_low: float = param(0.2, ge=0, doc="the range starts at 1 - eps_low; the release's 0.2")
    eps_high: float = param(0.28, ge=0, doc="the range ends at 1 + eps_high; the release's 0.28")
    dual_clip: float | None = param(10.0, gt=1, doc="bound for negative advantages; the release's 10; None: off")

    def expand(self) -> dict[str, Any]:
        bounds = {"eps_low": self.eps_low, "eps_high": self.eps_high, "dual_clip": self.dual_clip}
        return {
            "pruner": [{"name": "copris_is"}, {"name": "april", "over_sampling": self.over_sampling}],
            "ratio": {"name": "token", "denominator": "logp_behavior"},
            "clip": {"name": "ppo", **bounds},
        }
