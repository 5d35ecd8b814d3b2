"""Plug-ins of a user's own package: with state on both sides of verl, and one that reads logits.

Loaded into every process of a run with VERL_USE_EXTERNAL_MODULES.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

import rlx_plugins as rlx
from rlx_plugins.clipping.sat import SAT


@rlx.register("allocator", "test_growing")
@dataclass
class Growing(rlx.Allocator):
    """More rollouts for a prompt the lower the rewards it has been told of: ragged groups."""

    mean: float = rlx.state(0.0)
    seen: dict = rlx.state(factory=dict)

    def more(self, idle: list[rlx.Group], ctx: rlx.Context) -> list[rlx.Rollout]:
        n = 3 if self.mean > 0.3 else 5
        return [r for g in idle if not g.rollouts for r in g.start(n - len(g.prompt_key) % 3)]

    def observe(self, groups: list[rlx.Group], ctx: rlx.Context) -> None:
        for g in groups:
            self.seen[g.prompt_key] = self.seen.get(g.prompt_key, 0) + 1
        ctx.log("allocator/seen", sum(self.seen.values()))

    def feedback(self, batch: rlx.RolloutBatch, ctx: rlx.Context) -> None:
        self.mean = 0.5 * self.mean + 0.5 * float(batch.rewards.nanmean())


@rlx.register("advantage", "test_running_mean")
@dataclass
class RunningMean(rlx.Advantage):
    """Reward minus the mean of all rewards so far."""

    mean: torch.Tensor = rlx.state(factory=lambda: torch.zeros(()))

    def __call__(self, batch: rlx.RolloutBatch) -> dict[str, Any]:
        self.mean = 0.8 * self.mean + 0.2 * batch.rewards.nanmean().cpu()
        return {"advantages": batch.spread(batch.rewards - self.mean.to(batch.device))}


@rlx.register("clip", "test_counting")
@dataclass
class Counting(rlx.Clip):
    """REINFORCE that weighs its token losses by a number that grows with every call: state of the training workers."""

    calls: int = rlx.state(0)

    def __call__(self, terms: rlx.PolicyTerms) -> Any:
        self.calls += 1
        loss = -terms.ratio * terms.advantages * (1 + 0.1 * self.calls)
        return loss, {"calls": torch.tensor(float(self.calls))}


@rlx.register("clip", "test_logits")
@dataclass
class Logits(rlx.Clip):
    """REINFORCE on log-probs made of the logits, which must be those verl made of them."""

    capabilities = frozenset({"logits"})

    def from_logits(self, logits: torch.Tensor, columns: Any) -> dict[str, torch.Tensor]:
        return {"again": logits.log_softmax(-1).gather(-1, columns["response_ids"][..., None])[..., 0]}

    def __call__(self, terms: rlx.PolicyTerms) -> Any:
        again = rlx.masked(terms.logits["again"], terms.mask)
        difference = (again - rlx.masked(terms.logp_new, terms.mask)).abs().max().detach()
        return -again * terms.advantages, {"difference": difference}


@rlx.register("clip", "test_behavior")
@dataclass
class Behavior(SAT):
    """SAT, which also reports how far two log-probs are from what the engine reported."""

    @property
    def requires(self) -> frozenset[str]:
        return super().requires | {"logp_behavior", "logp_old", "logp_rollout"}

    def __call__(self, terms: rlx.PolicyTerms) -> Any:
        loss, metrics = super().__call__(terms)
        for name in ("behavior", "old"):
            off = rlx.masked(terms.batch[f"logp_{name}"] - terms.batch.logp_rollout, terms.mask)
            metrics[f"{name}_is_off"] = off.abs().max()
        return loss, metrics
