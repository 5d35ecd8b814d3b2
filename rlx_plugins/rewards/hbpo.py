"""HBPO: what a correct answer pays depends on its token budget, and falls beyond it."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass

import torch
from torch import Tensor

from ..core.batch import RolloutBatch
from ..core.errors import DataError
from ..core.kinds import Columns, Reward
from ..core.params import param
from ..core.registry import register
from ..core.segments import counted
from ..core.terms import masked
from ._correctness import correctness


@register("reward", "hbpo")
@dataclass
class HBPO(Reward):
    """Pays a correct answer within its budget a flat reward that is the higher the smaller the budget; beyond the
    budget the reward falls with the length and with the distance to the budget.

    within(b) = scale cos(pi b / (2 max_length))
    beyond(n, b) = scale cos(pi n / (2 max_length)) - overrun_coef (n - b)
    reward = 0 for a wrong answer or n > max_length; beyond(n, b) for n > b; within(b) otherwise.

    Reads correct [B] where the batch has it, else rewards (right = above success_threshold), budget [B] (tokens) and
    response_mask [B,T], whose tokens are the lengths n: a forced sentence that states the budget stands outside it.
    Returns rewards [B], NaN where correctness or budget is; budget_baseline [B] = within(b), for advantage=hbpo.

    Raises DataError for a budget above max_length, where the cosine turns negative. With a large overrun_coef a correct
    answer far over its budget pays less than a wrong one; a warning says so. scale, overrun_coef and max_length are
    reconstructed.
    """

    paper = "Hierarchical Budget Policy Optimization for Adaptive Reasoning, arXiv 2507.15844"
    requires = frozenset({"budget"})
    provides = frozenset({"budget_baseline"})

    scale: float = param(1.0, gt=0, doc="reward of a budget of 0 tokens; paper's beta, reconstructed")
    overrun_coef: float = param(1e-4, ge=0, doc="cost of a token beyond the budget; paper's alpha, reconstructed")
    max_length: int = param(4096, ge=1, doc="tokens; at least the largest budget; paper's l_max, reconstructed")
    success_threshold: float = param(0.5, doc="right = above it, in a batch without the column correct")

    def __call__(self, batch: RolloutBatch) -> Columns:
        correct = correctness(self, batch)
        length, budget = batch.lengths.to(correct.dtype), batch.budget.to(correct.dtype)
        self._check_budgets(budget)
        within = self._cosine(budget)
        beyond = self._cosine(length) - self.overrun_coef * (length - budget)
        paid = torch.where(length > budget, beyond, within)
        rewards = masked(paid, (correct > self.success_threshold) & (length <= self.max_length))
        judged = counted(correct) & torch.isfinite(budget)
        return {
            "rewards": torch.where(judged, rewards, torch.full_like(rewards, torch.nan)),
            "budget_baseline": within,
        }

    def _cosine(self, tokens: Tensor) -> Tensor:
        return self.scale * torch.cos(math.pi * tokens / (2 * self.max_length))

    def _check_budgets(self, budget: Tensor) -> None:
        over = budget > self.max_length
        if bool(over.any()):
            row = int(over.nonzero()[0, 0])
            raise DataError(f"row {row}: budget {budget[row]:g} exceeds reward hbpo.max_length {self.max_length}")
        if bool((self.overrun_coef * (self.max_length - budget) > self.scale).any()):
            warnings.warn(
                f"reward hbpo.overrun_coef: at {self.overrun_coef:g} per token a correct answer far beyond its budget"
                " is paid less than a wrong one",
                stacklevel=2,
            )
