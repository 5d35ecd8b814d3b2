"""Plug-ins of a user's own package: with state on both sides of verl, with logits, with hidden states.

Loaded into every process of a run with VERL_USE_EXTERNAL_MODULES.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

import rlx_plugins as rlx
from rlx_plugins.clipping.sat import SAT
from rlx_plugins.hosts.signals import TOP_TOKENS
from rlx_plugins.rewards.meds import MEDS


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

    requires = TOP_TOKENS
    capabilities = frozenset({"logits"})

    def from_logits(self, logits: torch.Tensor, columns: Any) -> dict[str, torch.Tensor]:
        again = logits.log_softmax(-1).gather(-1, columns["response_ids"][..., None])[..., 0]
        return {"again": again, "top_is_off": off_the_top(logits, columns)}

    def __call__(self, terms: rlx.PolicyTerms) -> Any:
        again = rlx.masked(terms.logits["again"], terms.mask)
        difference = (again - rlx.masked(terms.logp_new, terms.mask)).abs().max().detach()
        return -again * terms.advantages, {"difference": difference, "top_is_off": top_is_off(terms)}


@rlx.register("clip", "test_behavior")
@dataclass
class Behavior(SAT):
    """SAT, which also reports how far log-probs are from what the engine reported."""

    capabilities = frozenset({"logits"})

    @property
    def requires(self) -> frozenset[str]:
        return super().requires | TOP_TOKENS | {"logp_behavior", "logp_old", "logp_rollout"}

    def from_logits(self, logits: torch.Tensor, columns: Any) -> dict[str, torch.Tensor]:
        return {"top_is_off": off_the_top(logits, columns)}

    def __call__(self, terms: rlx.PolicyTerms) -> Any:
        loss, metrics = super().__call__(terms)
        for name in ("behavior", "old"):
            off = rlx.masked(terms.batch[f"logp_{name}"] - terms.batch.logp_rollout, terms.mask)
            metrics[f"{name}_is_off"] = off.abs().max()
        return loss, metrics | {"top_is_off": top_is_off(terms)}


@torch.no_grad()
def off_the_top(logits: torch.Tensor, columns: Any) -> torch.Tensor:
    """The farthest the engine's likeliest tokens are from the policy's, in nats; infinite where a token has none."""
    policy = logits.log_softmax(-1).topk(columns["rollout_top_ids"].shape[-1])
    reported = logits.log_softmax(-1).gather(-1, columns["rollout_top_ids"].clamp(min=0))
    off = [(columns["rollout_top_logp"] - x).abs().amax(-1) for x in (policy.values, reported)]
    return torch.maximum(*off).nan_to_num(nan=torch.inf, posinf=torch.inf)


def top_is_off(terms: rlx.PolicyTerms) -> torch.Tensor:
    """The farthest of all tokens of the micro-batch."""
    return rlx.masked(terms.logits["top_is_off"], terms.mask).max()


@rlx.register("reward", "test_states")
@dataclass
class States(MEDS):
    """MEDS, which also reports how far its hidden states are from those of the model in `path`."""

    path: str = ""

    def annotate(self, groups: list[rlx.Group], ctx: rlx.Context) -> Any:
        from transformers import AutoModelForCausalLM

        yield from super().annotate(groups, ctx)
        model = AutoModelForCausalLM.from_pretrained(self.path, dtype=torch.float32)
        off = []
        for r in (r for g in groups for r in g.done() if len(r)):
            with torch.no_grad():
                output = model(torch.tensor([r.prompt + r.context + r.tokens]), output_hidden_states=True)
            off.append(float((output.hidden_states[-1][0, -1] - r.extras["meds_features"]).abs().max()))
        ctx.log("reward/states_are_off", max(off))
