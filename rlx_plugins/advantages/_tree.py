"""Prefix trees of a group's rollouts: which rows contain a node, what is below it, and where forks have put it.

A node is a run of tokens between two branch points; the rows that contain it share these tokens. Ids are those of one
group: equal ids in different groups are different nodes.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from itertools import chain
from typing import Literal

import torch
from torch import Tensor

from ..core.batch import RolloutBatch
from ..core.errors import DataError
from ..core.segments import Segments
from ..core.terms import masked
from ..core.trajectory import Rollout
from ._ragged import padded_ids

TreeSource = Literal["forks", "column"]
"""Where a tree comes from: the forks the library's own parts made, or columns that rollout code returns."""

FORK_SIGNALS = frozenset({"rollout", "segment_ids"})


class Nodes:
    """The nodes of a batch, numbered 0..count-1 over all groups.

    group [B] dense group of each row; ids [B,K] node ids of its entries, -1 = none
    at    [B,K] number of each entry's node; `count` where there is none
    """

    def __init__(self, group: Tensor, ids: Tensor):
        self.group, self.ids = group, ids
        self._names = ids[ids >= 0].unique()
        codes, there = self._codes_of(ids)
        self._codes = codes[there].unique()
        self.count = len(self._codes)
        self.at = self.locate(ids)

    def locate(self, ids: Tensor) -> Tensor:
        """The number of each node id of [B,...]; `count` for -1 and for ids that no entry has."""
        codes, there = self._codes_of(ids)
        place = torch.searchsorted(self._codes, codes)
        found = there & (self._codes[place.clamp(max=max(self.count - 1, 0))] == codes) if self.count else there
        return torch.where(found, place, self.count)

    def _codes_of(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """One integer per (group, id), and where there is one."""
        last = max(len(self._names) - 1, 0)
        place = torch.searchsorted(self._names, ids.contiguous()).clamp(max=last)
        there = ids >= 0
        if len(self._names):
            there = there & (self._names[place] == ids)
        group = self.group.reshape(-1, *(1,) * (ids.ndim - 1))
        return group * (last + 1) + place, there

    def contained(self, where: Tensor) -> tuple[Tensor, Tensor]:
        """(row, node) of every node that a row has among its entries of `where` [B,K], each pair once."""
        row = torch.arange(len(self.at), device=self.at.device)[:, None].expand_as(self.at)
        pair = (row * (self.count + 1) + self.at)[where & (self.at < self.count)].unique()
        return pair // (self.count + 1), pair % (self.count + 1)

    def add(self, x: Tensor, where: Tensor) -> Tensor:
        """[count]: per node the sum of `x` [B] over the rows that have it among their entries of `where` [B,K]."""
        row, node = self.contained(where)
        return torch.zeros(self.count, dtype=x.dtype, device=x.device).index_add(0, node, x[row])

    def spread(self, per_node: Tensor, at: Tensor | None = None) -> Tensor:
        """[count] -> the shape of `at` (numbers of nodes, here the entries'): every entry its node's, 0 for none."""
        return torch.cat([per_node, per_node.new_zeros(1)])[self.at if at is None else at]


class Tree(Nodes):
    """Nodes with their parents, from the path [B,D] of each row: node ids from the prompt to its last node, -1 behind.

    parent  [count]: number of the parent, `count` + g for a child of group g's prompt
    depth   [count]: 0 for a child of the prompt
    """

    def __init__(self, groups: Segments, path: Tensor):
        super().__init__(groups.index, path)
        there = self.at < self.count
        prompt = (self.count + groups.index)[:, None]
        above = torch.cat([prompt, self.at[:, :-1]], 1)
        self.parent = torch.zeros(self.count, dtype=torch.int64, device=path.device)
        self.parent[self.at[there]] = above[there]
        self.depth = torch.zeros_like(self.parent)
        self.depth[self.at[there]] = torch.arange(path.shape[1], device=path.device).expand_as(path)[there]
        if bool((self.parent[self.at[there]] != above[there]).any()):
            raise DataError("a node of the rollout tree has different predecessors in the node_path of two rows")
        self.leaf = self.at.gather(1, (there.sum(1, keepdim=True) - 1).clamp(min=0))[:, 0]
        self.leaf = torch.where(there.any(1), self.leaf, self.count)

    @functools.cached_property
    def siblings(self) -> Segments:
        """The nodes by parent."""
        return Segments(self.parent)

    def leaf_rewards(self, rewards: Tensor) -> Tensor:
        """[count]: mean finite reward of the rows that end in the node; NaN without any."""
        ends = (self.leaf < self.count) & torch.isfinite(rewards)
        at = self.leaf[ends]
        total = torch.zeros(self.count, dtype=rewards.dtype, device=rewards.device).index_add(0, at, rewards[ends])
        n = torch.bincount(at, minlength=self.count).to(rewards.dtype)
        return torch.where(n > 0, total / n.clamp(min=1), torch.nan)

    def mean_of_children(self, leaf: Tensor) -> Tensor:
        """[count]: the mean of the children's values where any has one, else `leaf` [count]; NaN: undefined."""
        value = leaf.clone()
        for depth in range(int(self.depth.max()) if self.count else 0, 0, -1):
            here = ((self.depth == depth) & torch.isfinite(value)).nonzero()[:, 0]
            total = value.new_zeros(self.count).index_add(0, self.parent[here], value[here])
            n = torch.bincount(self.parent[here], minlength=self.count).to(value.dtype)
            value = torch.where(n > 0, total / n.clamp(min=1), value)
        return value

    def mean_of_leaves(self, leaf: Tensor) -> Tensor:
        """[count + G]: mean of the finite `leaf` values in and below each node, then each prompt; NaN: undefined."""
        known = torch.isfinite(leaf)
        room = leaf.new_zeros(int(self.group.max()) + 1 if len(self.group) else 0)
        total, n = torch.cat([masked(leaf, known), room]), torch.cat([known.to(leaf.dtype), room])
        for depth in range(int(self.depth.max()) if self.count else -1, -1, -1):
            here = (self.depth == depth).nonzero()[:, 0]
            total = total.index_add(0, self.parent[here], total[here])
            n = n.index_add(0, self.parent[here], n[here])
        return torch.where(n > 0, total / n.clamp(min=1), torch.nan)


def tree_columns(batch: RolloutBatch, source: TreeSource) -> tuple[Tensor, Tensor]:
    """(node_ids [B,T], node_path [B,D]): the node of every token (-1: not the model's) and the path of every row."""
    width = batch.response_mask.shape[1]
    if source == "column":
        return padded_ids(batch.node_ids, batch.device, width), padded_ids(batch.node_path, batch.device)
    pieces = fork_pieces(batch.rollout, batch.group.tolist())
    path = padded_ids([[node for node, _ in row] for row in pieces], batch.device)
    tokens = padded_ids([[n for _, n in row] for row in pieces], batch.device).clamp(min=0)
    end = torch.nn.functional.pad(tokens.cumsum(1).clamp(max=width), (1, 0))
    there = torch.arange(width, device=batch.device) < end[:, -1:]
    ids = torch.full(there.shape, -1, device=batch.device)
    ids.masked_scatter_(there, path.flatten().repeat_interleave(end.diff(dim=1).flatten()))
    return torch.where(batch.segment_ids >= 0, ids, -1), path


def fork_tree(rollouts: Sequence[Rollout], group: Sequence[int]) -> tuple[list[list[int]], list[list[int]]]:
    """Node ids per token, and the path, of every rollout of a batch, from the forks its tags tell of."""
    pieces = fork_pieces(rollouts, group)
    tokens = [list(chain.from_iterable([node] * n for node, n in row)) for row in pieces]
    return tokens, [[node for node, _ in row] for row in pieces]


def fork_pieces(rollouts: Sequence[Rollout], group: Sequence[int]) -> list[list[tuple[int, int]]]:
    """(node, number of its tokens) along every rollout of a batch, from the forks its tags tell of.

    A rollout from whose very end others were forked ends in a node of its own without tokens.
    """
    rows = {(g, r.slot): r for g, r in zip(group, rollouts, strict=True)}
    numbers: dict[tuple[int, int, int], int] = {}
    cuts: dict[tuple[int, int], set[int]] = {}

    @functools.cache
    def origin(g: int, slot: int) -> tuple[int, int] | None:
        """Whose tokens the rollout begins with and how many; None: its own. A row that is not there has its own."""
        forked = rows[g, slot].forked if (g, slot) in rows else None
        if forked is None:
            return None
        parent, at = forked
        while (above := origin(g, parent)) is not None and at <= above[1]:
            parent = above[0]  # forked within what the parent itself began with
        return (parent, at) if at > 0 else None

    def pieces(g: int, slot: int, end: int, whole: bool) -> list[tuple[int, int]]:
        """(node, tokens) of the rollout's first `end` tokens, which are all it has if `whole`."""
        above = origin(g, slot)
        start = above[1] if above else 0
        begun = pieces(g, above[0], start, whole=False) if above else []
        inside = sorted(c for c in cuts.get((g, slot), ()) if start < c < end or (whole and start < c == end))
        edges = [start, *inside, end]
        return begun + [
            (numbers.setdefault((g, slot, begin), len(numbers)), stop - begin) for begin, stop in zip(edges, edges[1:])
        ]

    for g, slot in rows:
        if (above := origin(g, slot)) is not None:
            cuts.setdefault((g, above[0]), set()).add(above[1])
    return [pieces(g, r.slot, len(r), whole=True) for g, r in zip(group, rollouts, strict=True)]
