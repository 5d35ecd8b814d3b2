"""ALP: a length penalty in proportion to how often the prompt is solved."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from ..core.batch import RolloutBatch
from ..core.kinds import Columns, Reward
from ..core.params import param
from ..core.registry import register
from ..core.segments import counted
from ._correctness import correctness


@register("reward", "alp")
@dataclass
class ALP(Reward):
    """Makes a token cost more on prompts the policy already solves often, in right and wrong answers alike.

    Each prompt's solve rate p is that of its own group of K judged rollouts, so easy prompts get shorter answers while
    hard ones stay free to think.

    penalty_i = penalty_coef * N_i * max(p_g, 1/K),   reward_i = [solved] - penalty_i.

    Reads correct [B] where the batch has it, else rewards (solved = above success_threshold), group [B], response_mask
    [B,T] for the lengths N_i in tokens / length_unit. Returns rewards [B] (NaN where correct is), or with
    output="component" -penalty as one more column "alp" of reward_components [B,K], for advantages of several
    components, rewards left alone (ours); solve_rate, length_coefficient and length_penalty [B].

    The linear form, its floor and the default coefficient are reconstructed. With advantages that are divided by the
    group's std a group of equal correctness is driven by length alone, whatever the coefficient; use dr_grpo, or
    components that are normalised apart, to avoid it.
    """

    paper = (
        "Just Enough Thinking: Efficient Reasoning with Adaptive Length Penalties Reinforcement Learning, "
        "arXiv 2506.05256"
    )
    provides = frozenset({"solve_rate", "length_coefficient", "length_penalty"})
    scope = "group"

    penalty_coef: float = param(1e-7, ge=0, doc="per token (per length_unit) at solve rate 1; reconstructed")
    length_unit: float = param(1.0, gt=0, doc="tokens; the response limit makes penalty_coef dimensionless; ours")
    floor: Literal["inverse_k"] | float = param("inverse_k", ge=0, doc="lowest coefficient: 1/K, or a number")
    success_threshold: float = param(0.5, doc="solved = above it, in a batch without the column correct")
    output: Literal["rewards", "component"] = param("rewards", doc="reward = [solved] - penalty, or a component; ours")

    @property
    def requires(self) -> frozenset[str]:
        return frozenset({"reward_components", "component_names"} if self.output == "component" else ())

    @property
    def shapes(self) -> frozenset[str]:
        return frozenset({"reward_components" if self.output == "component" else "rewards"})

    def __call__(self, batch: RolloutBatch) -> Columns:
        correct, groups = correctness(self, batch), batch.groups
        judged = counted(correct)
        solved = (correct > self.success_threshold).to(correct.dtype)
        count = groups.count(correct)
        rate = groups.mean(solved, judged)
        if self.floor == "inverse_k":
            floor = torch.where(count > 0, 1 / count.clamp(min=1), torch.zeros_like(count))
        else:
            floor = torch.full_like(count, self.floor)
        coefficient = groups.spread(rate.maximum(floor))
        penalty = self.penalty_coef * (batch.lengths.to(correct.dtype) / self.length_unit) * coefficient
        unjudged = torch.full_like(penalty, torch.nan)
        columns = {
            "solve_rate": groups.spread(rate),
            "length_coefficient": coefficient,
            "length_penalty": penalty,
        }
        if self.output == "rewards":
            return columns | {"rewards": torch.where(judged, solved - penalty, unjudged)}
        cost = torch.where(judged, -penalty, unjudged).to(batch.reward_components.dtype)
        components = torch.cat([batch.reward_components, cost[:, None]], 1)
        return columns | {"reward_components": components, "component_names": (*batch.component_names, "alp")}
