"""DATPO: the change of the tree's value along a block, with a bonus for blocks unlike their siblings."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from ..core.batch import RolloutBatch
from ..core.context import Context
from ..core.kinds import Advantage, Columns
from ..core.operations import Forward, Steps
from ..core.params import param
from ..core.registry import register
from ..core.segments import counted, wide
from ..core.terms import masked
from ..core.trajectory import Group, Rollout
from ._tree import FORK_SIGNALS, Tree, TreeSource, fork_tree, tree_columns

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

    Reads rewards [B] (NaN = unscorable), group [B], response_mask [B,T] and the tree: from the forks of the rollout
    program (tree="forks"; the columns rollout and segment_ids), or block ids in node_ids [B,T] (-1 = none) and
    node_path (per row its block ids from the prompt to its end) with tree="column". Embeddings: per row one vector for
    each block of its path in block_embedding (embedding="column"; the paper's are a sentence model's), or made here at
    the end of the rollout (embedding="hidden", with forks only): the policy's last hidden state after the prompt and
    the block's own tokens, which is our substitute.

    Returns advantages [B,T], 0 where masked; keep_mask [B,T], 1 in the first row with a trained copy of the token's
    block and 0 in later ones (`aggregate: datpo` drops these); the bonus weight, a number. There is no division by a
    spread. An unscorable leaf enters no value and its block gets 0. Reconstructed: V(root), no diversity at the root,
    and that the continuation of the forked rollout is a sibling of its forks.
    """

    paper = (
        "Difficulty-Adaptive Sentence-entropy-guided Tree-structured Policy Optimization, arXiv 2609.08650"
    )

    bonus_start: float = param(0.2, ge=0, doc="weight of the diversity bonus at the first step; the paper's alpha_0")
    bonus_end: float = param(0.0, ge=0, doc="weight of the bonus at the last step; the paper's 0")
    tree: TreeSource = param("forks", doc="the library's forks, or the columns node_ids and node_path")
    embedding: Literal["hidden", "column"] = param("hidden", doc="of a block: from the policy, or block_embedding")

    def check(self) -> None:
        if self.tree == "column" and self.embedding == "hidden":
            raise ConfigError(
                "advantage datpo.embedding: 'hidden' is for the library's forks (tree='forks'); give the column"
                " block_embedding and embedding='column'"
            )

    @property
    def requires(self) -> frozenset[str]:
        tree = FORK_SIGNALS if self.tree == "forks" else frozenset({"node_ids", "node_path"})
        return tree | ({"block_embedding"} if self.embedding == "column" else frozenset())

    @property
    def provides(self) -> frozenset[str]:
        return frozenset({"keep_mask", *(["block_embedding"] if self.embedding == "hidden" else [])})

    @property
    def capabilities(self) -> frozenset[str]:
        return frozenset({"forward:hidden"} if self.embedding == "hidden" else ())

    @property
    def idle_hooks(self) -> frozenset[str]:
        return frozenset() if self.embedding == "hidden" else frozenset({"annotate"})

    def annotate(self, groups: list[Group], ctx: Context) -> Steps:
        if self.embedding == "column":
            return
        rollouts = [r for g in groups for r in g.done()]
        _, paths = fork_tree(rollouts, [n for n, g in enumerate(groups) for _ in g.done()])
        tokens, _ = fork_tree(rollouts, [n for n, g in enumerate(groups) for _ in g.done()])
        blocks: dict[int, Rollout] = {}
        for rollout, ids, path in zip(rollouts, tokens, paths, strict=True):
            for block in path:
                blocks.setdefault(block, _only(rollout, [i == block for i in ids]))
        hidden = yield Forward(list(blocks.values()), "hidden")
        vectors = {block: [float(v) for v in h] for block, h in zip(blocks, hidden, strict=True)}
        for rollout, path in zip(rollouts, paths, strict=True):
            rollout.extras["block_embedding"] = [vectors[block] for block in path]
