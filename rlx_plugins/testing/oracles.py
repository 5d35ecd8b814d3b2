"""The hosts' own functions on given tensors: what parity tests compare with and benchmarks measure against."""

from __future__ import annotations

import collections
import dataclasses
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor


class OneRank:
    """As much of an accelerator as TRL's `_compute_loss` touches."""

    num_processes = 1

    def gather(self, x: Tensor) -> Tensor:
        return x

    def reduce(self, x: Tensor, reduction: str = "sum") -> Tensor:
        return x


def trl_compute_loss(
    loss_type: str,
    logp_new: Tensor,
    logp_old: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    level: str = "token",
    epsilon_high: float = 0.2,
    off_policy_mask_threshold: float | None = None,
    importance_weights: Tensor | None = None,
    num_items: float | None = None,
    **arguments: Any,
) -> Tensor:
    """`GRPOTrainer._compute_loss` itself, on an object that has only what it reads; its forward pass gives `logp_new`.

    logp_new, logp_old [B,T]; advantages [B] or [B,T]; mask [B,T] bool; importance_weights [B,T] or [B,1] as from vLLM;
    num_items divides in dapo, cispo and vespo (default: the mask's tokens); arguments: further fields of GRPOConfig.
    """
    from trl import GRPOConfig, GRPOTrainer

    defaults = {f.name: f.default for f in dataclasses.fields(GRPOConfig)}
    trainer = SimpleNamespace(
        args=SimpleNamespace(**defaults | {"steps_per_generation": 1} | arguments),
        loss_type=loss_type,
        importance_sampling_level=level,
        epsilon_low=0.2,
        epsilon_high=epsilon_high,
        beta=0.0,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=off_policy_mask_threshold,
        get_off_policy_mask=GRPOTrainer.get_off_policy_mask,
        get_gamma_weights=GRPOTrainer.get_gamma_weights,
        use_vllm=importance_weights is not None,
        vllm_importance_sampling_correction=importance_weights is not None,
        max_completion_length=50,
        current_gradient_accumulation_steps=1,
        model=SimpleNamespace(training=True),
        accelerator=OneRank(),
        aux_loss_enabled=False,
        _entropy_bonus_enabled=False,
        _metrics={"train": collections.defaultdict(list)},
        _get_per_token_logps_and_entropies=lambda *a, **k: (logp_new, torch.zeros_like(logp_old), None),
    )
    ids = torch.zeros(mask.shape, dtype=torch.int64)
    inputs = {
        "prompt_ids": ids,
        "prompt_mask": ids,
        "completion_ids": ids,
        "completion_mask": mask.long(),
        "advantages": advantages,
        "old_per_token_logps": logp_old,
        "num_items_in_batch": mask.sum() if num_items is None else torch.tensor(num_items),
    }
    if importance_weights is not None:
        inputs["importance_sampling_ratio"] = importance_weights
    return GRPOTrainer._compute_loss(trainer, None, inputs)
