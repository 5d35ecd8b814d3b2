"""Guide: a hint in the context, only for prompts whose every rollout failed."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from ..core.context import Context
from ..core.kinds import Hint
from ..core.operations import Forward, Steps
from ..core.params import param
from ..core.registry import register
from ..core.trajectory import Group, Rollout
from ._behavior import engine_logp, lacks_behavior, record_behavior
from ._columns import column_tokens

GUIDED = "guided"
"""Tag of a rollout sampled with the hint; it is the row's `source` in the batch."""


@register("hint", "guide")
@dataclass
class Guide(Hint):
    """A prompt is first sampled without help; if all its rollouts fail, more are sampled with a hint in the context.

    What they achieve is learnt as if the hint had not been there: rows keep the plain prompt, and `logp_behavior`
    records the log-probabilities under the hinted one, for a ratio with `denominator: logp_behavior` (method `guide`).

    A group is triggered if it has a finite reward, none above `success_threshold`, and a hint. Its further `k_guided`
    rollouts are those of the hinted prompt; `mode="append"` trains both kinds as one group, "replace" the hinted alone.

    The hint is the dataset column `column` (token ids, see rlx_plugins.hints), placed after the prompt.

    Deviation: with "replace" the un-hinted rows leave the batch (`keep=False`) where the function form gives them
    advantage 0; the gradient is the same up to the number of tokens that divides it.
    """

    paper = "Adaptive Guidance Accelerates Reinforcement Learning of Reasoning Models, arXiv 2506.13923"
    provides = frozenset({"logp_behavior"})

    column: str = param("hint", doc="dataset column of the hint")
    k_guided: int | None = param(None, ge=1, doc="hinted rollouts of a failed prompt; None: half of group_size")
    success_threshold: float = param(0.0, doc="a rollout succeeded if its reward is above it")
    mode: Literal["append", "replace"] = param("append", doc="un-hinted rows of a helped group: trained too, or not")
    max_prompt_tokens: int | None = param(None, ge=1, doc="no hint where prompt and hint are longer; None: unbounded")
    behavior_logp: Literal["engine", "forward"] = param(
        "engine", doc="log-probs of hinted rows: as the engine reported them, or from a forward pass of the trainer"
    )

    @property
    def token_columns(self) -> frozenset[str]:
        """Dataset columns the host gives as token ids."""
        return frozenset({self.column})

    @property
    def requires(self) -> frozenset[str]:
        return frozenset({"logp_rollout"} if self.behavior_logp == "engine" else ())

    @property
    def capabilities(self) -> frozenset[str]:
        forward = {"forward:logp"} if self.behavior_logp == "forward" else set[str]()
        return frozenset({"rounds", "context"} | forward)

    def more(self, idle: list[Group], ctx: Context) -> list[Rollout]:
        failed = [g for g in idle if self._triggered(g)]
        new = [r for g in failed for r in g.start(self.k_guided or max(1, ctx.group_size // 2))]
        for r in new:
            r.tag = GUIDED
        ctx.log("hint/guide_triggered", ctx.metrics.get("hint/guide_triggered", 0.0) + len(failed))
        return new

    def prepare(self, new: list[Rollout], groups: dict[str, Group], ctx: Context) -> None:
        for r in new:
            if r.tag == GUIDED:
                r.context = column_tokens(self, groups[r.group], self.column)

    def annotate(self, groups: list[Group], ctx: Context) -> Steps:
        """Record the hinted log-probabilities of the rows that go into the batch."""
        if self.mode == "replace":
            for g in groups:
                replaced = any(r.tag == GUIDED for r in g.done())
                for r in g.rollouts:
                    r.keep = r.keep and not (replaced and r.tag != GUIDED)
        rows = [r for g in groups for r in g.done() if r.context and any(map(lacks_behavior, r.segments))]
        if not rows:
            return
        if self.behavior_logp == "engine":
            known = [engine_logp(self, r, "hint.behavior_logp=forward") for r in rows]
        else:
            known = yield Forward(rows, "logp")
        for r, logp in zip(rows, known, strict=True):
            record_behavior(r, logp)

    def _triggered(self, group: Group) -> bool:
        """Everything tried so far failed, nothing was tried with the hint yet, and there is one that fits."""
        scored = [reward for reward in group.rewards() if math.isfinite(reward)]
        if not scored or max(scored) > self.success_threshold or any(r.tag == GUIDED for r in group.rollouts):
            return False
        hint = column_tokens(self, group, self.column)
        room = self.max_prompt_tokens
        return bool(hint) and (room is None or len(group.prompt) + len(hint) <= room)
