"""Whether the answers are right, as the shapers see it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..core.batch import RolloutBatch
from ..core.errors import ConfigError
from ..core.segments import wide


def correctness(part: Any, batch: RolloutBatch) -> Tensor:
    """[B] the column `correct` where the batch has it, else the rewards: above `part.success_threshold` = right.

    Float32 or better; NaN = not judged. A column of booleans is the host's own judgement of the raw rewards, which no
    threshold can change: ConfigError where one was set.
    """
    rewards = wide(batch.rewards)
    if not batch.has("correct"):
        return rewards
    if batch.correct.dtype != torch.bool:
        return wide(batch.correct)
    if part.success_threshold != type(part).success_threshold:
        raise ConfigError(
            f"{part.kind} {part.name}.success_threshold={part.success_threshold:g} would do nothing: this host judges"
            " the raw rewards itself (0.5; on verl rlx.success_threshold); set it there, or make the reward of a right"
            " answer greater than 0.5 and drop this parameter"
        )
    return torch.where(torch.isnan(rewards), rewards, batch.correct.to(rewards.dtype))
