"""ARPO: a shared prefix gets the mean advantage of the rollouts that contain it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ..core.batch import RolloutBatch
from ..core.kinds import Advantage, Columns
from ..core.params import param
from ..core.registry import register
from ..core.segments import counted, wide
from ..core.terms import masked
from ._group_baseline import group_baseline
from ._ragged import padded_ids
from ._runs import Runs
from ._tree import FORK_SIGNALS, Nodes, TreeSource, tree_columns


@register("advantage", "arpo")
@dataclass
class ARPO(Advantage):
    """Credits tokens that several rollouts of a group share with the mean advantage of these rollouts, and each
    rollout's own tokens with its own.

    z_i = (r_i - mean_g) / (std_g + eps);   U(v): the scorable rollouts of the group that contain node v;
    mode="hard": A_it = mean of z over U(node of t);   mode="soft" (the paper's runs): A_it = z_i, which is GRPO.

    Reads rewards [B] (NaN = unscorable), group [B], response_mask [B,T] and the tree: from the forks of the rollout
    program (tree="forks"; the columns rollout and segment_ids), or node_ids [B,T] (tree="column": a list per row or
    [B,T]), where equal ids in a group mean the same shared tokens and -1 a token the model did not write. Returns
    advantages [B,T], 0 where masked and for unscorable rows; share_count [B,T], the size of U; trajectory_advantage
    [B], z.

    Where every copy of a shared token is trained, as in the released code, copies repeat the same value. The library's
    forks train a prefix once, in its first row (`response_mask` is off in the others): there, in both modes, the token
    carries the sum of z over U, so that the sum over the trained copies is that of the paper either way.

    Soft is the paper's default, but says nothing new; hard is not in the released code and is the default here. A group
    of one has advantage 0; singleton="raw" gives verl's r / (1 + eps).
    """

    paper = "Agentic Reinforced Policy Optimization, arXiv 2507.19849"
    provides = frozenset({"share_count", "trajectory_advantage"})

    mode: Literal["hard", "soft"] = param(
        "hard", doc="credit of shared tokens: mean of their rollouts, or each its own"
    )
    normalize: bool = param(True, doc="divide by the group's standard deviation; verl's norm_adv_by_std_in_grpo")
    tree: TreeSource = param("forks", doc="the library's forks, or the column node_ids")
    eps: float = param(1e-6, gt=0, doc="added to the standard deviation; verl's")
    ddof: int = param(1, ge=0, le=1, doc="1: unbiased standard deviation; verl's")
    singleton: Literal["zero", "raw"] = param("zero", doc="advantage of a group of one: 0, or its raw reward (verl)")

    @property
    def requires(self) -> frozenset[str]:
        return FORK_SIGNALS if self.tree == "forks" else frozenset({"node_ids"})

    def __call__(self, batch: RolloutBatch) -> Columns:
        rewards = wide(batch.rewards)
        scorable = counted(rewards)
        z = self.z_scores(batch, rewards)
        runs = Runs(self._node_ids(batch))
        nodes = Nodes(batch.groups.index, runs.of)
        there = (nodes.at < nodes.count) & scorable[:, None]
        share = nodes.add(torch.ones_like(z), there)
        copies = nodes.add(torch.ones_like(z), there & runs.any(batch.response_mask))
        shared = nodes.spread(nodes.add(z, there) / copies.clamp(min=1))
        if self.mode == "soft":
            everywhere = nodes.spread((copies == share).to(z.dtype)) > 0
            shared = torch.where(everywhere, z[:, None], shared)
        return {
            "advantages": masked(runs.spread(masked(shared, there)), batch.response_mask),
            "share_count": runs.spread(nodes.spread(share)),
            "trajectory_advantage": z,
        }

    def z_scores(self, batch: RolloutBatch, rewards: Tensor) -> Tensor:
        """z [B], 0 for unscorable rows."""
        mean, std = group_baseline(batch.groups, rewards, self.singleton, self.ddof)
        z = masked(rewards - mean, counted(rewards))
        return z / (std + self.eps) if self.normalize else z

    def _node_ids(self, batch: RolloutBatch) -> Tensor:
        if self.tree == "forks":
            return tree_columns(batch, "forks")[0]
        return padded_ids(batch.node_ids, batch.device, batch.response_mask.shape[1])
