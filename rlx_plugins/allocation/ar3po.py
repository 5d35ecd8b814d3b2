"""AR3PO: responses in stages; a prompt leaves with its first correct one."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..core.context import Context
from ..core.kinds import Allocator
from ..core.params import param
from ..core.registry import register
from ..core.trajectory import Group, Rollout


@register("allocator", "ar3po")
@dataclass
class AR3PO(Allocator):
    """Responses are drawn in stages; after each, prompts that have a correct response leave, so that easy prompts cost
    one stage and hard ones all.

    Every prompt still active draws `per_stage` responses; it stays active while the largest of its rewards is below
    `correct_at`. All responses are trained on: groups have a whole number of stages. With pass rate p and
    q = (1 - p)^per_stage a prompt costs (1 - q^stages) / (1 - q) stages on average.

    A NaN reward, and a response that was lost, count as 0. The stop depends on the outcome: in a group that stopped
    after its first stage the mean over-estimates the pass rate slightly; nothing corrects it.

    Stages and their size are reconstructed. The paper's reuse of earlier correct responses is a replay of its own.
    """

    paper = "Adaptive Rollout and Response Reuse Policy Optimization, arXiv 2509.25808"
    capabilities = frozenset({"rounds"})

    stages: int = param(2, ge=1, doc="stages at most, S; reconstructed")
    per_stage: int = param(4, ge=1, doc="responses of an active prompt per stage, k; reconstructed")
    correct_at: float = param(1.0, doc="reward from which a response is correct; reconstructed")

    def more(self, idle: list[Group], ctx: Context) -> list[Rollout]:
        active = [g for g in idle if len(g.rollouts) < self.stages * self.per_stage and not self.solved(g)]
        new = [r for g in active for r in g.start(self.per_stage)]
        ctx.log("allocator/ar3po_rollouts", sum(len(g.rollouts) for g in ctx.started))
        ctx.log("allocator/ar3po_solved", sum(self.solved(g) for g in ctx.started))
        return new

    def solved(self, group: Group) -> bool:
        """Whether a response of the prompt is correct."""
        return any(x >= self.correct_at for x in group.rewards() if not math.isnan(x))

    def expected_stages(self, pass_rate: float) -> float:
        """Stages a prompt of this pass rate costs on average."""
        q = (1 - pass_rate) ** self.per_stage
        return float(self.stages) if q == 1 else (1 - q**self.stages) / (1 - q)
