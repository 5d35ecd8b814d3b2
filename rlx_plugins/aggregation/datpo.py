"""DATPO's reduction: the mean over unique tokens of the tree."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ..core.batch import RolloutBatch
from ..core.kinds import Aggregate, Columns
from ..core.registry import register
from ..core.terms import masked


@register("aggregate", "datpo")
@dataclass
class UniqueTokenMean(Aggregate):
    """Mean over tokens, each block of a rollout tree counted once however many rows contain it.

    weight = keep_mask where mask [B,T], count = its sum per row [B]. Reads keep_mask [B,T] of 0 and 1, which
    `advantage: datpo` makes. Where the library's forks train a prefix once anyway, this is token_mean.
    """

    paper = "Difficulty-Adaptive Sentence-entropy-guided Tree-structured Policy Optimization, arXiv 2609.08650"
    requires = frozenset({"keep_mask"})

    def __call__(self, batch: RolloutBatch, mask: Tensor) -> Columns:
        weight = masked(batch.keep_mask.to(batch.dtype), mask)
        return {"weight": weight, "count": weight.sum(1)}
