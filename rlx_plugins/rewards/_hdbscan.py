"""Density-based clusters of a few hundred points, without a number of clusters: HDBSCAN with min_samples 1.

With one sample every point is a core point at distance 0, so the density tree is single linkage. The tree is condensed
to clusters of at least `min_size` points, and the most persistent ones are chosen (excess of mass); the whole set is
never one cluster. Campello, Moulavi and Sander, 2013.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

NOISE = -1
CLOSEST = 1e-12
"""Points nearer than this are at one place."""


@dataclass
class _Cluster:
    """A branch of the condensed tree: the density at which it is born, its persistence, its children and points."""

    birth: float
    stability: float = 0.0
    children: list[int] = field(default_factory=list)
    points: list[int] = field(default_factory=list)


def hdbscan(points: Tensor, min_size: int = 2) -> list[int]:
    """Cluster label of each point [N,H], 0, 1, ... in the order of their first points; -1 = noise."""
    n = len(points)
    if n < 2:
        return [NOISE] * n
    clusters = _condensed(_single_linkage(points.double()), n, min_size)
    chosen = _most_persistent(clusters)
    owner = [NOISE] * n
    for c in chosen:
        for p in _all_points(clusters, c):
            owner[p] = c
    names: dict[int, int] = {}
    return [NOISE if c == NOISE else names.setdefault(c, len(names)) for c in owner]


def _single_linkage(points: Tensor) -> list[tuple[int, int, float]]:
    """The n - 1 merges (node, node, distance), nearest first; merge i makes node n + i. Prim's tree, then union."""
    n = len(points)
    distance = torch.cdist(points, points, compute_mode="donot_use_mm_for_euclid_dist")
    nearest, parent = distance[0].clone(), torch.zeros(n, dtype=torch.int64)
    outside = torch.ones(n, dtype=torch.bool)
    outside[0] = False
    edges = []
    for _ in range(n - 1):
        j = int(torch.where(outside, nearest, torch.inf).argmin())
        edges.append((float(nearest[j]), int(parent[j]), j))
        outside[j] = False
        closer = distance[j] < nearest
        nearest, parent = torch.where(closer, distance[j], nearest), torch.where(closer, j, parent)
    node = list(range(2 * n - 1))

    def top(i: int) -> int:
        while node[i] != i:
            node[i] = node[node[i]]
            i = node[i]
        return i

    merges = []
    for at, (d, a, b) in enumerate(sorted(edges)):
        left, right = top(a), top(b)
        node[left] = node[right] = n + at
        merges.append((left, right, d))
    return merges


def _condensed(merges: list[tuple[int, int, float]], n: int, min_size: int) -> list[_Cluster]:
    """The tree of clusters, root first: a split counts only where both sides have `min_size` points."""
    leaves: list[list[int]] = [[i] for i in range(n)]
    for left, right, _ in merges:
        leaves.append(leaves[left] + leaves[right])
    clusters = [_Cluster(0.0)]
    stack = [(len(leaves) - 1, 0)]
    while stack:
        at, c = stack.pop()
        if at < n:
            clusters[c].points.append(at)
            continue
        left, right, d = merges[at - n]
        density = 1 / max(d, CLOSEST)
        gained = density - clusters[c].birth
        big = [side for side in (left, right) if len(leaves[side]) >= min_size]
        if len(big) == 2:
            clusters[c].stability += gained * len(leaves[at])
            for side in big:
                clusters[c].children.append(len(clusters))
                stack.append((side, len(clusters)))
                clusters.append(_Cluster(density))
            continue
        for side in (left, right):
            if side in big:
                stack.append((side, c))
            else:
                clusters[c].points += leaves[side]
                clusters[c].stability += gained * len(leaves[side])
    return clusters


def _most_persistent(clusters: list[_Cluster]) -> list[int]:
    """Of every branch the cluster itself or its descendants, whichever persists longer; never the root."""
    best: list[tuple[float, list[int]]] = [(0.0, [])] * len(clusters)
    for c in range(len(clusters) - 1, -1, -1):  # children come after their parents
        below = sum(best[k][0] for k in clusters[c].children)
        own = clusters[c].stability
        if c == 0 or below > own:
            best[c] = below, [x for k in clusters[c].children for x in best[k][1]]
        else:
            best[c] = own, [c]
    return best[0][1]


def _all_points(clusters: list[_Cluster], c: int) -> list[int]:
    return clusters[c].points + [p for k in clusters[c].children for p in _all_points(clusters, k)]
