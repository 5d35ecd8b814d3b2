"""ELPO: a step against its sibling branches, and against all complete trajectories."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..core.batch import RolloutBatch
from ..core.kinds import Advantage, Columns
from ..core.params import param
from ..core.registry import register
from ..core.segments import counted, wide, zscore
from ..core.terms import masked
from ._runs import Runs
from ._tree import FORK_SIGNALS, Tree, TreeSource, tree_columns


class NodeCredit(NamedTuple):
    """Per node of the tree [N]: reward (NaN: undefined), branch and trajectory part, and their mix."""

    reward: Tensor
    branch: Tensor
    trajectory: Tensor
    advantage: Tensor


@register("advantage", "elpo")
@dataclass
class ELPO(Advantage):
    """Mixes, for every run of steps between two branch points, how it fares against its sibling branches with how the
    complete trajectories through it fare in the group.

    R(leaf) = mean reward of the rollouts that end there, R(v) = plain mean of the children's R;
    A_b(v) = z-score of R(v) among the children of v's parent (0 for fewer than two);
    A_t(v) = mean z-score of the rollouts through v;   A(v) = branch_weight A_b(v) + (1 - branch_weight) A_t(v).

    Reads rewards [B] (NaN = unscorable), group [B], response_mask [B,T] and the tree: from the forks of the rollout
    program (tree="forks"; the columns rollout and segment_ids), or node_ids [B,T] (node of each token, -1: not the
    model's) and node_path (per row its node ids from the prompt to its end) with tree="column". Returns advantages
    [B,T], 0 where masked, for unscorable rows and nodes without any scorable rollout.

    Every copy of a shared node that is trained has the same value; the library's forks train a prefix once, in its
    first row. Nodes are averaged over children, not leaves: an unbalanced tree weights leaves unequally, by design.
    Reconstructed: ddof, eps, and 0 for a node without siblings.
    """

    paper = (
        "Learning from the Irrecoverable: Error-Localized Policy Optimization for Tool-Integrated LLM Reasoning,"
        " arXiv 2602.09598"
    )

    branch_weight: float = param(0.5, ge=0, le=1, doc="weight of the comparison with the siblings; the paper's lambda")
    tree: TreeSource = param("forks", doc="the library's forks, or the columns node_ids and node_path")
    eps: float = param(1e-6, gt=0, doc="added to both standard deviations; reconstructed")
    ddof: int = param(1, ge=0, le=1, doc="1: unbiased standard deviations; reconstructed")

    @property
    def requires(self) -> frozenset[str]:
        return FORK_SIGNALS if self.tree == "forks" else frozenset({"node_ids", "node_path"})

    def __call__(self, batch: RolloutBatch) -> Columns:
        node_ids, path = tree_columns(batch, self.tree)
        tree = Tree(batch.groups, path)
        runs = Runs(node_ids)
        of_run = tree.spread(self.credit(tree, batch).advantage, tree.locate(runs.of))
        advantages = runs.spread(masked(of_run, counted(batch.rewards)[:, None]))
        return {"advantages": masked(advantages, batch.response_mask)}

    def credit(self, tree: Tree, batch: RolloutBatch) -> NodeCredit:
        """The credit of every node."""
        rewards = wide(batch.rewards)
        reward = tree.mean_of_children(tree.leaf_rewards(rewards))
        branch = zscore(tree.siblings, reward, self.eps, self.ddof)
        through = counted(rewards)[:, None] & (tree.at < tree.count)
        n = tree.add(torch.ones_like(rewards), through)
        z = zscore(batch.groups, rewards, self.eps, self.ddof)
        trajectory = tree.add(z, through) / n.clamp(min=1)
        mixed = self.branch_weight * branch + (1 - self.branch_weight) * trajectory
        return NodeCredit(reward, branch, trajectory, mixed)
