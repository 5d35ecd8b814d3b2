"""The weight of each reward component."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ..core.batch import RolloutBatch
from ..core.errors import ConfigError
from ..core.segments import wide

Weights = dict[str, float] | tuple[float, ...] | None
"""By the component's name, or one per component in the batch's order (alphabetical by name); None: all equal."""


def component_weights(batch: RolloutBatch, weights: Weights, label: str, equal: float = 1.0) -> Tensor:
    """[K] weights for batch.reward_components [B,K]; `equal` each when `weights` is None.

    Raises ConfigError when `weights` has another number of entries or names other components; `label` says whose.
    """
    components = batch.reward_components
    count = components.shape[1]
    if weights is None:
        values = [equal] * count
    elif isinstance(weights, Mapping):
        names = batch.component_names if batch.has("component_names") else ()
        if set(weights) != set(names):
            raise ConfigError(
                f"{label}: the reward components are {sorted(names)}, the weights are for {sorted(weights)}"
            )
        values = [weights[name] for name in names]
    else:
        if len(weights) != count:
            raise ConfigError(f"{label}: {len(weights)} weights for {count} reward components")
        values = list(weights)
    return torch.tensor(values, dtype=wide(components).dtype, device=components.device)


def scorable_components(batch: RolloutBatch) -> Tensor:
    """[B,K] float32 or better: the reward components, NaN in every entry of a row whose reward is NaN (unscorable)."""
    components = wide(batch.reward_components)
    return torch.where(torch.isnan(batch.rewards)[:, None], torch.full_like(components, torch.nan), components)
