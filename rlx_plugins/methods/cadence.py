"""CADENCE's reinforcement side as one name: partial credit, brevity, and self-distillation at the end of the run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..advantages.cadence import CADENCE as CADENCEAdvantage
from ..core.kinds import Method
from ..core.params import param
from ..core.registry import register
from ..replay.cadence import CADENCE as CADENCEReplay
from ..rewards.cadence import CADENCE as CADENCEReward
from ._parts import spec


@register("method", "cadence")
@dataclass
class CADENCE(Method):
    """Expands to reward=cadence, advantage=cadence and replay=cadence, and to the paper's loss: the mean over rows of
    the mean over tokens of -A logp (clip=gpg, no ratio). Its distillation is a `distill` part named beside it.

    The parameters are those of the parts, which check them; `rlx show reward cadence`, `rlx show advantage cadence` and
    `rlx show replay cadence` say what each means.
    """

    paper = CADENCEReplay.paper

    max_partial: float = param(CADENCEReward.max_partial, doc="reward")
    tolerance: float = param(CADENCEReward.tolerance, doc="reward")
    floor: float = param(CADENCEReward.floor, doc="reward")
    success_threshold: float = param(CADENCEReward.success_threshold, doc="reward and advantage")
    reward_coef: float = param(CADENCEAdvantage.reward_coef, doc="advantage")
    brevity_coef: float = param(CADENCEAdvantage.brevity_coef, doc="advantage")
    length_slope: float = param(CADENCEAdvantage.length_slope, doc="advantage")
    min_consistency: float = param(CADENCEReplay.min_consistency, doc="replay")
    min_samples: int = param(CADENCEReplay.min_samples, doc="replay")
    max_per_prompt: int | None = param(CADENCEReplay.max_per_prompt, doc="replay")
    phase: float = param(CADENCEReplay.phase, doc="replay")
    marker: tuple[int, ...] | None = param(CADENCEReplay.marker, doc="replay; token ids")

    def expand(self) -> dict[str, Any]:
        return {
            "reward": spec(self, CADENCEReward),
            "advantage": spec(self, CADENCEAdvantage),
            "replay": spec(self, CADENCEReplay),
            "clip": "gpg",
            "aggregate": "seq_mean_token_mean",
        }
