"""A contextual bandit over rollouts: a small network learns which ones move the policy forward."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..core.batch import RolloutBatch
from ..core.kinds import Columns, Selector
from ..core.params import param
from ..core.randomness import hash_bits
from ..core.registry import register
from ..core.segments import Segments, overall_mean_std, wide
from ..core.state import state
from ..core.terms import masked, masked_mean
from ._steps import masked_rows

FEATURES = (
    *("reward", "advantage", "group_mean", "group_std", "length", "truncated"),
    *("entropy", "clip_fraction", "age", "usage"),
)
FORGET = 20
"""A rollout's usage count is forgotten after this many steps in which it was not in the batch."""


@register("selector", "bandit_sched")
@dataclass
class BanditScheduler(Selector):
    """Every rollout is an arm with ten cheap features; a two-layer network scores it, the best of each group are
    trained, and the change of the mean reward from this step to the next is what the chosen ones' scores learn.

        score = W2 relu(x W1 + b1) + b2;   `budget` rows of every group, one after the other: with probability
        `explore` a random row not chosen yet, else the one of the highest score
        R = (V' - V) - entropy_coef max(0, H' - max(H, entropy_threshold)),   V mean reward, H mean entropy of a batch
        one SGD step on mean over the chosen of (score - R)^2

    Features, in order: reward; advantage (mean over the row); mean and std of the group's rewards; length over
    `max_length`; truncated; mean entropy; share of clipped tokens when last used (a column clip_fraction [B] where the
    batch has one, else 0); staleness / age_scale; times used / usage_scale. NaN counts as 0.

    Reads rewards, advantages, entropy, staleness, finished, row_id; returns weight [B,T], 1 for the chosen rows and 0
    for the others, and the numbers loss, reward and unknown_features. Rows without tokens or without a reward are not
    candidates. Advantages keep the baseline of the whole group, and the loss its denominator. State: the network, the
    features of the last choice, V and H, and how often each rollout was used.

    The paper reuses old rollouts by the same scores: chosen here are the rows of the batch, replayed ones (`replay:`)
    among them. Feature list, scaling, exploration, loss and all constants are reconstructions.
    """

    paper = "Contextual-bandit rollout scheduling for RLVR, arXiv 2602.08499"
    requires = frozenset({"entropy", "staleness"})
    scope = "group"

    budget: int = param(4, ge=0, doc="rows of every group that are trained; reconstructed")
    explore: float = param(0.1, ge=0, le=1, doc="chance of a random row; reconstructed")
    entropy_threshold: float = param(1.0, ge=0, doc="nats up to which growing entropy costs nothing; reconstructed")
    entropy_coef: float = param(0.1, ge=0, doc="cost of a nat of entropy gained above it; reconstructed")
    learning_rate: float = param(0.01, ge=0, doc="of the network's SGD; reconstructed")
    width: int = param(64, ge=1, doc="hidden units; reconstructed")
    max_length: int | None = param(None, ge=1, doc="tokens of a full-length response; None: the batch's longest")
    age_scale: float = param(10.0, gt=0, doc="policy versions; reconstructed")
    usage_scale: float = param(4.0, gt=0, doc="times used; reconstructed")

    network: dict = state(factory=dict)
    chosen: Tensor | None = state(None)
    value: float | None = state(None)
    entropy: float | None = state(None)
    usage: dict = state(factory=dict)

    def __call__(self, batch: RolloutBatch) -> Columns:
        live = (batch.lengths > 0) & torch.isfinite(batch.rewards)
        value = float(overall_mean_std(batch.rewards)[0])
        entropy = float(masked_mean(wide(batch.entropy), batch.response_mask))
        columns = self._learn_from_last(value, entropy)
        x = self.features(batch)
        unknown = torch.isnan(x)
        x = masked(x, ~unknown)
        explore = [self._per_group(batch, f"bandit_sched/explore/{j}") < self.explore for j in range(self.budget)]
        order = choose(self.scores(x, batch.seed), batch.groups, live, explore, batch.uniform("bandit_sched/rank"))
        picked = order >= 0
        self.chosen, self.value, self.entropy = x[picked].cpu(), value, entropy
        self._count_use(batch, picked)
        columns["unknown_features"] = int(unknown[live].sum())
        return {"weight": batch.spread(picked.to(batch.dtype)), **columns}

    def features(self, batch: RolloutBatch) -> Tensor:
        """[B,10] float64, in the order of FEATURES; NaN = unknown."""
        mask, groups = batch.response_mask, batch.groups
        mean, std, _ = groups.mean_std(batch.rewards)
        longest = self.max_length or max(int(batch.lengths.max()), 1)
        stale = wide(batch.staleness.to(batch.dtype))
        used = [self.usage.get(row, (0, 0))[0] for row in batch.row_id.tolist()]
        columns = [
            batch.rewards,
            masked_rows(batch.advantages, mask),
            groups.spread(mean),
            groups.spread(std),
            batch.lengths / longest,
            ~batch.finished if batch.has("finished") else torch.zeros_like(batch.rewards),
            masked_rows(batch.entropy, mask),
            batch.clip_fraction if batch.has("clip_fraction") else torch.zeros_like(batch.rewards),
            (stale if stale.ndim == 1 else masked_rows(stale, mask)) / self.age_scale,
            torch.tensor(used, device=batch.device) / self.usage_scale,
        ]
        return torch.stack([c.double() for c in columns], 1)

    def scores(self, x: Tensor, seed: int = 0) -> Tensor:
        """[N] the network's score of each row of features [N,10]."""
        if not self.network:
            self.network = _new_network(x.shape[1], self.width, seed)
        return _score({name: w.to(x.device) for name, w in self.network.items()}, x)

    def reward(self, before: tuple[float, float], after: tuple[float, float]) -> float:
        """R from (mean reward, mean entropy) before and after a step."""
        grown = max(0.0, after[1] - max(before[1], self.entropy_threshold))
        return (after[0] - before[0]) - self.entropy_coef * grown

    def learn(self, x: Tensor, target: float) -> float:
        """One SGD step of the chosen rows' scores [n,10] towards `target`; returns the loss, 0 without rows."""
        if not len(x):
            return 0.0
        with torch.enable_grad():
            network = {name: w.detach().clone().requires_grad_() for name, w in self.network.items()}
            loss = (_score(network, x) - target).square().mean()
            gradients = torch.autograd.grad(loss, list(network.values()))
        self.network = {
            name: (w - self.learning_rate * g).detach() for (name, w), g in zip(network.items(), gradients, strict=True)
        }
        return float(loss.detach())

    def _learn_from_last(self, value: float, entropy: float) -> dict[str, Any]:
        if self.chosen is None or self.value is None or self.entropy is None:
            return {}
        target = self.reward((self.value, self.entropy), (value, entropy))
        return {"loss": self.learn(self.chosen, target), "reward": target}

    def _per_group(self, batch: RolloutBatch, name: str) -> Tensor:
        """[B] one uniform number per group: that of its first row."""
        groups = batch.groups
        place = groups.rank(torch.arange(batch.size, dtype=torch.float64, device=batch.device))
        return groups.spread(groups.sum(masked(batch.uniform(name), place == 0)))

    def _count_use(self, batch: RolloutBatch, picked: Tensor) -> None:
        for row, used in zip(batch.row_id.tolist(), picked.tolist(), strict=True):
            self.usage[row] = (self.usage.get(row, (0, 0))[0] + used, batch.step)
        self.usage = {row: (n, step) for row, (n, step) in self.usage.items() if n and batch.step - step < FORGET}


def choose(scores: Tensor, groups: Segments, live: Tensor, explore: list[Tensor], random_order: Tensor) -> Tensor:
    """[B] int64: as the how-manieth of its group each row was chosen, -1 if it was not.

    explore    for every choice, [B] bool: this group's choice is a random one
    random_order   [B]: random choices take the smallest not chosen yet, the others the highest score; ties by row
    """
    order = torch.full_like(groups.index, -1)
    for j, at_random in enumerate(explore):
        key = torch.where(at_random, random_order.double(), -scores.double())
        order = torch.where(groups.rank(key, live & (order < 0)) == 0, torch.full_like(order, j), order)
    return order


def _new_network(inputs: int, width: int, seed: int) -> dict[str, Tensor]:
    """Weights uniform within 1/sqrt(fan in), the same on every rank."""
    generator = torch.Generator().manual_seed(hash_bits(seed, "bandit_sched/network") & (2**63 - 1))

    def uniform(*shape: int, fan_in: int) -> Tensor:
        return (2 * torch.rand(*shape, generator=generator, dtype=torch.float64) - 1) / math.sqrt(fan_in)

    return {
        "W1": uniform(inputs, width, fan_in=inputs),
        "b1": uniform(width, fan_in=inputs),
        "W2": uniform(width, fan_in=width),
        "b2": uniform(1, fan_in=width)[0],
    }


def _score(network: dict[str, Tensor], x: Tensor) -> Tensor:
    return torch.relu(x @ network["W1"] + network["b1"]) @ network["W2"] + network["b2"]
