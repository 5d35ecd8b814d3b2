"""A critic without a network: a table of values, moved towards the targets an advantage estimator returns."""

from __future__ import annotations

import torch
from torch import Tensor

from ...core.terms import masked
from .policy import START


class TableCritic:
    """The expected return before each token, by prompt and previous token: value [P,6] (float64), 0 at first.

    rate  share of the way to the mean target that an update goes
    """

    def __init__(self, prompts: int, *, rate: float = 0.5):
        self.value = torch.zeros(prompts, START + 1, dtype=torch.float64)
        self.rate = rate

    def __call__(self, prompt: Tensor, previous: Tensor) -> Tensor:
        """[B,T] values for prompts [B] and the tokens [B,T] before each response token."""
        return self.value[prompt[:, None], previous.clamp(0, START)]

    def fit(self, prompt: Tensor, previous: Tensor, targets: Tensor, mask: Tensor) -> None:
        """Move the values that tokens of `mask` [B,T] stand for towards the mean of their targets."""
        width = self.value.shape[1]
        at = (prompt[:, None] * width + previous.clamp(0, START)).flatten()
        live = mask.flatten()
        n = torch.bincount(at, live.double(), minlength=self.value.numel())
        total = torch.bincount(at, masked(targets.double(), mask).flatten(), minlength=self.value.numel())
        value = self.value.flatten()
        moved = value + self.rate * (total / n.clamp(min=1) - value)
        self.value = torch.where(n > 0, moved, value).reshape(self.value.shape)
