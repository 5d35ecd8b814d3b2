"""VADE: prompts by a Thompson draw of their success rate and the information a rollout of it would bring."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..core.context import Context
from ..core.kinds import Sampler
from ..core.params import param
from ..core.registry import register
from ..core.state import state
from ..core.trajectory import Group


def utility(success_rate: Tensor) -> Tensor:
    """theta (1 - theta)^2 [N]: the gain expected of a prompt solved with probability theta [N]; at most 4/27 (1/3)."""
    return success_rate * (1 - success_rate).square()


def _nothing() -> Tensor:
    return torch.zeros(0, dtype=torch.float64)


@register("sampler", "vade")
@dataclass
class Vade(Sampler):
    """Every prompt carries a Beta posterior of the probability that the current policy solves it; each step draws one
    plausible value per prompt and trains on those with the largest utility.

    theta_i ~ Beta(successes_i + 1, failures_i + 1), one vectorised draw of numpy's PCG64 over all prompts in the order
    of the dataset; u_i = theta_i (1 - theta_i)^2; the n largest, ties by position; a prompt at most once per step.

    After the step, for prompts visited: successes <- decay_sample * successes + sum of rewards, failures likewise with
    1 - reward; for all others both times `decay_global`. Old evidence fades because the policy moves on.

    Rewards are clipped to [0, 1] (graded ones count in part); NaN and infinite ones are dropped, and a prompt left
    without any counts as not visited. Where a pruner chose the survivors, their rewards count with 1/propensity.

    The two decays and the order of decay and count are reconstructed: the paper's numbers were not at hand.
    """

    paper = "VADE: Variance-Aware Dynamic Sampling via Online Sample-Level Difficulty Estimation, arXiv 2511.18902"
    capabilities = frozenset({"choose_prompts"})

    decay_sample: float = param(0.8, gt=0, le=1, doc="weight of the old counts of a prompt that was visited")
    decay_global: float = param(0.995, gt=0, le=1, doc="weight of the old counts of every other prompt")

    keys: list = state(factory=list)
    successes: Tensor = state(factory=_nothing)
    failures: Tensor = state(factory=_nothing)

    def draw(self, n: int, ctx: Context) -> list[str]:
        self._follow(ctx.prompts)
        gain = utility(self.plausible(ctx))
        started = {g.prompt_key for g in ctx.started}
        ranked = torch.sort(gain, descending=True, stable=True).indices.tolist()
        free = (self.keys[i] for i in ranked if self.keys[i] not in started)
        chosen = [key for key, _ in zip(free, range(n))]
        if chosen:
            ctx.log("sampler/vade_utility", gain[ranked[: len(chosen)]].mean().item())
        return chosen

    def plausible(self, ctx: Context) -> Tensor:
        """[N]: one success rate per prompt, drawn from its posterior."""
        seed = int(ctx.uniform("vade/theta") * 2**53)
        rng = np.random.Generator(np.random.PCG64(seed))
        return torch.from_numpy(rng.beta(self.successes.numpy() + 1, self.failures.numpy() + 1)).clamp(0, 1)

    def mean(self) -> Tensor:
        """[N]: posterior mean of every prompt."""
        return (self.successes + 1) / (self.successes + self.failures + 2)

    def observe(self, groups: list[Group], ctx: Context) -> None:
        self._follow(ctx.prompts)
        place = {key: i for i, key in enumerate(self.keys)}
        solved, failed = torch.zeros_like(self.successes), torch.zeros_like(self.failures)
        for g in groups:
            if g.prompt_key in place:
                s, f = _tally(g)
                solved[place[g.prompt_key]] += s
                failed[place[g.prompt_key]] += f
        visited = solved + failed > 0
        decay = torch.where(visited, self.decay_sample, torch.full_like(solved, self.decay_global))
        self.successes = decay * self.successes + solved
        self.failures = decay * self.failures + failed

    def _follow(self, prompts: Iterable[str]) -> None:
        """Put the counts into the order of the dataset; a prompt not seen before starts without any."""
        now = list(prompts)
        if now == self.keys:
            return
        old = {key: i for i, key in enumerate(self.keys)}
        index = torch.tensor([old.get(key, len(old)) for key in now], dtype=torch.int64)
        none = torch.zeros(1, dtype=torch.float64)
        self.keys = now
        self.successes = torch.cat([self.successes, none])[index]
        self.failures = torch.cat([self.failures, none])[index]


def _tally(group: Group) -> tuple[float, float]:
    """(successes, failures) among the finite rewards of the finished rollouts; they add up to their number."""
    scored = [r for r in group.done() if r.reward is not None and math.isfinite(r.reward)]
    if not scored:
        return 0.0, 0.0
    weight = len(scored) / sum(1 / r.propensity for r in scored)
    solved = sum(min(max(r.reward, 0.0), 1.0) / r.propensity for r in scored) * weight
    return solved, len(scored) - solved
