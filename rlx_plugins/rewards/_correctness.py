"""Whether the answers are right, as the shapers see it."""

from __future__ import annotations

from torch import Tensor

from ..core.batch import RolloutBatch
from ..core.segments import wide


def correctness(batch: RolloutBatch) -> Tensor:
    """[B] the column `correct` where the batch has it, else the rewards: above the success threshold = right.

    Float32 or better; NaN = not judged.
    """
    return wide(batch.correct if batch.has("correct") else batch.rewards)
