"""How sure the policy that starts the step was of each token."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from ..core.batch import RolloutBatch
from ..core.segments import wide
from ..core.terms import masked
from ._token_column import token_column

Confidence = Literal["column", "sampled"]
"""The column confidence (an engine's top-5 probability mass), or the probability of the sampled token."""


def token_confidence(batch: RolloutBatch, source: Confidence) -> Tensor:
    """[B,T] in [0, 1], clipped; 0 where masked and where unknown (NaN)."""
    if source == "sampled":
        known = masked(wide(batch.logp_old), batch.response_mask)
        return masked(known.exp(), batch.response_mask).clamp(0, 1)
    given = wide(token_column(batch, "confidence", torch.nan))
    return masked(torch.nan_to_num(given, nan=0.0), batch.response_mask).clamp(0, 1)
