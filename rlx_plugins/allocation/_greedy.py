"""A budget given out one piece at a time, to whom one more is worth most."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence


def greedy(
    gain: Callable[[int, int], float], start: Sequence[int], most: float, budget: int, *, least: float
) -> list[int]:
    """`start` plus one at a time where `gain(i, count)` is largest (ties: the first), up to `most` each.

    Stops when `budget` is spent, or when no gain is above `least`.
    """
    counts = list(start)
    heap = [(-gain(i, n), i) for i, n in enumerate(counts) if n < most]
    heapq.heapify(heap)
    while budget > 0 and heap and -heap[0][0] > least:
        _, i = heapq.heappop(heap)
        counts[i] += 1
        budget -= 1
        if counts[i] < most:
            heapq.heappush(heap, (-gain(i, counts[i]), i))
    return counts
