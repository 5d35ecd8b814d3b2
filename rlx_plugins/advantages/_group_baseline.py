"""Mean and spread of each row's group, with the two conventions for a group of one, and the hosts' constants."""

from __future__ import annotations

import torch
from torch import Tensor

from ..core.segments import Segments

EPS = {None: 1e-6, "verl": 1e-6, "trl": 1e-4}
"""What each host adds to a group's standard deviation before dividing by it; the library's own is verl's."""

SINGLETON = {None: "zero", "verl": "raw", "trl": "zero"}
"""What each host does with a group of one: advantage 0, or its raw reward as if the group had mean 0 and std 1."""


def group_baseline(groups: Segments, x: Tensor, singleton: str, ddof: int = 1) -> tuple[Tensor, Tensor]:
    """(mean, std) of each row's group, in the shape of `x` [B] or [B,K]; entries that are not finite are left out.

    In a group with one counted entry the mean is the entry itself and std 0, so that it is centred to exactly 0;
    with singleton="raw" they are 0 and 1.
    """
    mean, std, n = groups.mean_std(x, ddof=ddof)
    if singleton == "raw":
        alone = n == 1
        mean = torch.where(alone, torch.zeros_like(mean), mean)
        std = torch.where(alone, torch.ones_like(std), std)
    return groups.spread(mean), groups.spread(std)
