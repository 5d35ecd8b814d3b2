"""Guide as one name: hints for failed prompts, and a ratio of the plain prompt over the hinted one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from ..core.kinds import Method
from ..core.params import param
from ..core.registry import register


@register("method", "guide")
@dataclass
class GuideMethod(Method):
    """`hint: guide`, GRPO's advantage, and PPO's clip of a ratio whose denominator is the policy *with* the hint.

    A hinted rollout was sampled from pi(. | question, hint), while pi(. | question) is trained: tokens that only make
    sense thanks to the hint have a tiny ratio and get little credit. On plain rows this is PPO.
    """

    paper = "Adaptive Guidance Accelerates Reinforcement Learning of Reasoning Models, arXiv 2506.13923"

    column: str = param("hint", doc="dataset column of the hint")
    k_guided: int | None = param(None, ge=1, doc="hinted rollouts of a failed prompt; None: half of group_size")
    success_threshold: float = param(0.0, doc="a rollout succeeded if its reward is above it")
    mode: Literal["append", "replace"] = param("append", doc="un-hinted rows of a helped group: trained too, or not")
    max_prompt_tokens: int | None = param(None, ge=1, doc="no hint where prompt and hint are longer; None: unbounded")
    behavior_logp: Literal["engine", "forward"] = param("engine", doc="where the log-probs of hinted rows come from")
    std: bool = param(True, doc="advantages in units of the group's spread; False: centred only")
    eps_low: float = param(0.2, ge=0, doc="the clip range starts at 1 - eps_low; PPO's 0.2")
    eps_high: float = param(0.2, ge=0, doc="the clip range ends at 1 + eps_high; PPO's 0.2")
    log_clamp: float = param(20.0, gt=0, doc="bound on |log ratio| in nats")

    def expand(self) -> dict[str, Any]:
        own = self.params()
        hint = ("column", "k_guided", "success_threshold", "mode", "max_prompt_tokens", "behavior_logp")
        return {
            "hint": {"name": "guide", **{name: own[name] for name in hint}},
            "advantage": {"name": "grpo", "scale": "group" if self.std else "none"},
            "ratio": {"name": "token", "denominator": "logp_behavior", "log_clamp": self.log_clamp},
            "clip": {"name": "ppo", "eps_low": self.eps_low, "eps_high": self.eps_high},
        }
