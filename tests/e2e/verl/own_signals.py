"""A value model, and parts that look at signals of the user's: every one is a function of the tokens or the prompt.

Loaded into every process of a run with VERL_USE_EXTERNAL_MODULES.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

import rlx_plugins as rlx


def value(prompt: list[int], place: int) -> float:
    return 0.1 * (len(prompt) % 5) + 0.01 * place


def values(prompts: list[list[int]], responses: list[list[int]], masks: list[list[bool]]) -> list[list[float]]:
    """The value model."""
    return [[value(prompt, t) for t in range(len(tokens))] for prompt, tokens in zip(prompts, responses)]


@rlx.register("selector", "test_signals")
@dataclass
class Signals(rlx.Selector):
    """Keeps every token, and reports how far the columns are from what they should be made of."""

    requires = frozenset({"confidence", "values", "predicted", "target", "turn_ids", "brevity"})

    def __call__(self, batch: rlx.RolloutBatch) -> dict[str, Any]:
        mask, ids = batch.response_mask, batch.response_ids
        last = torch.where(mask, torch.arange(mask.shape[1]), -1).amax(1)
        place = torch.arange(mask.shape[1]).expand_as(mask)
        prompts = batch["values"][:, :1]  # the prompt's share of a value
        wrong = {
            "found_confidence": (batch.confidence - (ids % 10) / 10)[mask].abs().max(),
            "found_values": (batch["values"] - prompts - 0.01 * place)[mask].abs().max(),
            "found_predicted": (batch.predicted - 1 - last).abs().max(),
            "found_turns": (batch.turn_ids - torch.where(place < self._first_turn(mask), 7, 8))[mask].abs().max(),
            "found_outside": (batch.turn_ids[~mask] + 1).abs().max(),
            "found_target": (batch.target - torch.tensor([float(key) for key in batch.prompt_key])).abs().max(),
            "found_tool_tokens": (mask.cumsum(1) - 1 != place)[mask].sum(),
            "found_brevity": batch.brevity.mean(),
            "found_components": batch.reward_components.shape[1],
            "found_clip_epsilon": rlx.create("clip", "echo").range(batch).clip_epsilon.mean(),
        }
        return {"weight": torch.ones_like(batch.advantages), **{k: float(v) for k, v in wrong.items()}}

    @staticmethod
    def _first_turn(mask: torch.Tensor) -> torch.Tensor:
        """[B,1] tokens before the tool's answer."""
        return (~mask).int().argmax(1, keepdim=True)


@rlx.register("selector", "test_proximal")
@dataclass
class Proximal(rlx.Selector):
    """Keeps every token, and reports how far the averaged policy is from the one the step starts with."""

    requires = frozenset({"logp_prox", "logp_old", "confidence"})

    def __call__(self, batch: rlx.RolloutBatch) -> dict[str, Any]:
        gap = rlx.masked(batch.logp_prox - batch.logp_old, batch.response_mask)
        confidence = batch.confidence[batch.response_mask]
        sure = batch.logp_old[batch.response_mask].exp() - confidence
        return {
            "weight": torch.ones_like(batch.advantages),
            "found_gap": float(gap.abs().max()),
            "found_confidence": float(confidence.mean()),
            "found_beyond": float(sure[batch.logp_old[batch.response_mask].exp() > 0.5].max()),
        }
