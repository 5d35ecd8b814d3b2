"""DATPO: the change of the tree's value along a block, with a bonus for blocks unlike their siblings."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..core.batch import RolloutBatch
from ..core.context import Context
from ..core.errors import DataError
from ..core.kinds import Advantage, Columns
from ..core.operations import Forward, Steps
from ..core.params import param
from ..core.registry import register
from ..core.segments import counted, wide
from ..core.terms import masked
from ..core.trajectory import Group, Rollout, Segment
from ._runs import Runs
from ._tree import Tree, TreeSource, fork_pieces, tree_columns

BLOCK_COLUMNS = frozenset({"node_ids", "node_path", "block_embedding"})

ROUNDING = 1e-9
"""A change of value no larger than this, relative to the rewards' scale, is none: it must not earn the bonus."""


class BlockCredit(NamedTuple):
    """Per block [N]: change of value, distance from the siblings, and the advantage made of both."""

    base: Tensor
    diversity: Tensor
    advantage: Tensor


@register("advantage", "datpo")
@dataclass
class DATPO(Advantage):
    """Cuts the tree of a prompt's rollouts into blocks at its forks. A block's advantage is the change of the Monte
    Carlo value along it; blocks that raise it get a bonus for being semantically different from their siblings.

    V(f) = mean reward of all leaves below fork f, V(root) of all;   base_b = V(end_b) - V(start_b), a leaf's V its
    reward;   Div_b = 1 - mean cosine of the block's embedding with its siblings', 0 at the root or without siblings;
    A_b = base_b + [base_b > 0] bonus Div_b,   bonus from `bonus_start` to `bonus_end`, linear over the run's steps.

    Reads rewards [B] (NaN = unscorable), group [B], response_mask [B,T] and, per row, node_ids (block of each token, -1
    = none), node_path (its blocks from the prompt to its end) and block_embedding (a vector for each block of the
    path). With tree="forks" they are made here at the end of the rollout from the forks of the rollout program; a
    block's embedding is then the policy's last hidden state after the prompt and the block's own tokens, our substitute
    for the paper's sentence model. With tree="column" rollout code returns them.

    Returns advantages [B,T], 0 where masked; keep_mask [B,T], 1 in the first row with a trained copy of the token's
    block and 0 in later ones (`aggregate: datpo` drops these); bonus_weight, a number. There is no division by a
    spread. An unscorable leaf enters no value and its block gets 0; a shared block whose first copy lies in such a row
    is not trained. Reconstructed: V(root), no diversity at the root,
    and that the continuation of the forked rollout is a sibling of its forks.
    """

    paper = "Difficulty-Adaptive Sentence-entropy-guided Tree-structured Policy Optimization, arXiv 2609.08650"

    bonus_start: float = param(0.2, ge=0, doc="weight of the diversity bonus at the first step; the paper's alpha_0")
    bonus_end: float = param(0.0, ge=0, doc="weight of the bonus at the last step; the paper's 0")
    tree: TreeSource = param("forks", doc="blocks of the library's forks, or columns that rollout code returns")

    @property
    def requires(self) -> frozenset[str]:
        return frozenset() if self.tree == "forks" else BLOCK_COLUMNS

    @property
    def provides(self) -> frozenset[str]:
        return frozenset({"keep_mask"}) | (BLOCK_COLUMNS if self.tree == "forks" else frozenset())

    @property
    def capabilities(self) -> frozenset[str]:
        return frozenset({"forward:hidden"} if self.tree == "forks" else ())

    @property
    def idle_hooks(self) -> frozenset[str]:
        return frozenset({"annotate"} if self.tree == "column" else ())

    def annotate(self, groups: list[Group], ctx: Context) -> Steps:
        if self.tree == "column":
            return
        rollouts = [r for g in groups for r in g.done()]
        pieces = fork_pieces(rollouts, [n for n, g in enumerate(groups) for _ in g.done()])
        blocks: dict[int, Rollout] = {}
        for rollout, row in zip(rollouts, pieces, strict=True):
            path = [node for node, _ in row]
            of_token = torch.tensor(path, dtype=torch.int64).repeat_interleave(torch.tensor([n for _, n in row]).long())
            rollout.extras |= {"node_ids": of_token, "node_path": path}
            tokens, begin = rollout.tokens, 0
            for block, n in row:
                if block not in blocks:
                    own = [Segment(tokens[begin : begin + n])]
                    blocks[block] = dataclasses.replace(rollout, segments=own, extras={})
                begin += n
        hidden = yield Forward(list(blocks.values()), "hidden")
        vectors = dict(zip(blocks, hidden, strict=True))
        for rollout in rollouts:
            rollout.extras["block_embedding"] = [vectors[block] for block in rollout.extras["node_path"]]

    def __call__(self, batch: RolloutBatch) -> Columns:
        tree, credit = self.tree_credit(batch)
        mask, runs = batch.response_mask, Runs(tree_columns(batch, "column")[0])
        at = tree.locate(runs.of)
        first = first_copies(tree, at, runs.any(mask))
        return {
            "advantages": masked(runs.spread(tree.spread(credit.advantage, at)), mask),
            "keep_mask": masked(runs.spread(first.to(batch.dtype)), mask),
            "bonus_weight": self.bonus_weight(batch),
        }

    def tree_credit(self, batch: RolloutBatch) -> tuple[Tree, BlockCredit]:
        """The tree of the batch and the credit of its blocks."""
        tree = Tree(batch.groups, tree_columns(batch, "column")[1])
        embeddings = block_embeddings(batch, tree)
        return tree, self.credit(tree, wide(batch.rewards), embeddings, self.bonus_weight(batch))

    def bonus_weight(self, batch: RolloutBatch) -> float:
        """The annealed weight of the diversity bonus; `bonus_end` in a run without a length."""
        progress = min(max(batch.step / batch.total_steps, 0.0), 1.0) if batch.total_steps > 0 else 1.0
        return self.bonus_start + (self.bonus_end - self.bonus_start) * progress

    def credit(self, tree: Tree, rewards: Tensor, embeddings: Tensor, bonus: float) -> BlockCredit:
        """The credit of every block; rewards [B], embeddings [N,H]."""
        value = tree.mean_of_leaves(tree.leaf_rewards(rewards))
        base = value[: tree.count] - value[tree.parent]
        scale = masked(rewards, counted(rewards)).abs().amax() if len(rewards) else rewards.sum()
        base = masked(base, torch.isfinite(base) & (base.abs() > ROUNDING * scale))
        diversity = sibling_diversity(tree, embeddings)
        return BlockCredit(base, diversity, base + masked(bonus * diversity, base > 0))


def sibling_diversity(tree: Tree, embeddings: Tensor) -> Tensor:
    """Div [N]: 1 - mean cosine with the siblings; 0 at the root and without siblings. A zero vector has cosine 0."""
    length = embeddings.norm(dim=1, keepdim=True)
    unit = masked(embeddings / torch.where(length > 0, length, torch.ones_like(length)), length > 0)
    groups = tree.siblings
    others = groups.spread(groups.sum(unit)) - unit
    n = groups.spread(groups.sizes) - 1
    cosine = (unit * others).sum(1) / n.clamp(min=1)
    return masked(1 - cosine, (n > 0) & (tree.parent < tree.count))


def block_embeddings(batch: RolloutBatch, tree: Tree) -> Tensor:
    """[N,H] the embedding of every block, from the rows' lists of vectors along their paths."""
    vectors = [torch.as_tensor(vector, dtype=batch.dtype) for row in batch.block_embedding for vector in row]
    at = tree.at[tree.at < tree.count]
    if len(vectors) != len(at):
        raise DataError(
            f"advantage datpo: block_embedding has {len(vectors)} vectors for the {len(at)} blocks of node_path;"
            " every row needs one for each block of its path"
        )
    rows = torch.stack(vectors).to(batch.device) if vectors else batch.rewards.new_zeros(0, 0, dtype=batch.dtype)
    return rows.new_zeros(tree.count, rows.shape[1]).index_copy(0, at, rows)


def first_copies(tree: Tree, at: Tensor, live: Tensor) -> Tensor:
    """[B,R] bool: the runs that are in the first row with a live copy of their block; `at` [B,R] numbers of blocks."""
    rows = len(at)
    row = torch.arange(rows, device=at.device)[:, None].expand_as(at)
    live = live & (at < tree.count)
    first = torch.full((tree.count + 1,), rows, device=at.device)
    first = first.scatter_reduce(0, torch.where(live, at, tree.count).flatten(), row.flatten(), "amin")
    return live & (first[at] == row)
