"""Quantiles of Student's t for whole degrees of freedom."""

from __future__ import annotations

import math
from functools import cache


@cache
def two_sided_quantile(outside: float, degrees: int) -> float:
    """t such that |T| > t with probability `outside`, for T with `degrees` >= 1 degrees of freedom."""
    low, high = 0.0, math.pi / 2
    for _ in range(60):
        middle = (low + high) / 2
        if _within(middle, degrees) < 1 - outside:
            low = middle
        else:
            high = middle
    return math.sqrt(degrees) * math.tan((low + high) / 2)


def _within(angle: float, degrees: int) -> float:
    """P(|T| < sqrt(degrees) tan(angle)): the finite series in cos of Abramowitz and Stegun 26.7.3 and 26.7.4."""
    sine, square = math.sin(angle), math.cos(angle) ** 2
    odd = degrees % 2
    term = math.cos(angle) if odd else 1.0
    total = 0.0
    for k in range(2 + odd, degrees + 1, 2):
        total += term
        term *= square * (k - 1) / k
    return 2 / math.pi * (angle + sine * total) if odd else sine * total
