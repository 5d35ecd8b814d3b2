"""Rollout replay as one name: groups of recent steps, and the clip that makes them usable."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..core.kinds import Method
from ..core.params import param
from ..core.registry import register


@register("method", "rollout_replay")
@dataclass
class RolloutReplayMethod(Method):
    """`replay: rollout_replay` fills part of the batch with stored groups; `clip: rollout_replay` divides by the policy
    that sampled them and clips around the ratio the step starts with. Advantages are GRPO's on the assembled batch.
    """

    paper = (
        "Improving Data Efficiency for LLM Reinforcement Fine-tuning Through Difficulty-targeted Online Data Selection"
        " and Rollout Replay, arXiv 2506.05316"
    )

    fresh_share: float = param(0.5, gt=0, le=1, doc="share of the batch rolled out anew, sigma; the release's 0.5")
    capacity: int = param(512, ge=1, doc="groups in the buffer; the release's 512")
    drop_degenerate: bool = param(True, doc="leave out groups whose mean reward is exactly 0 or 1")
    eps_low: float = param(0.2, ge=0, lt=1, doc="the clip interval starts at r_old (1 - eps_low); the release's 0.2")
    eps_high: float = param(0.2, ge=0, doc="the clip interval ends at r_old (1 + eps_high); the release's 0.2")

    def expand(self) -> dict[str, Any]:
        own = self.params()
        replay = {name: own[name] for name in ("fresh_share", "capacity", "drop_degenerate")}
        return {
            "replay": {"name": "rollout_replay", **replay},
            "clip": {"name": "rollout_replay", "eps_low": self.eps_low, "eps_high": self.eps_high},
            "advantage": "grpo",
            "aggregate": "token_mean",
        }
