"""MEDS: wrong answers that look like mistakes made many times before cost more."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from ..core.batch import RolloutBatch
from ..core.context import Context
from ..core.kinds import Columns, Reward
from ..core.operations import Forward, Steps
from ..core.params import param
from ..core.registry import register
from ..core.segments import wide
from ..core.state import state
from ..core.trajectory import Group
from ._correctness import correctness
from ._hdbscan import NOISE, hdbscan

NOT_LOOKED_UP = -2
SMALLEST_NORM = 1e-12


class Lookup(NamedTuple):
    """A feature's cluster (-1 noise, -2 not looked up) and the penalty of a mistake of its kind."""

    label: int
    penalty: float


@register("reward", "meds")
@dataclass
class MEDS(Reward):
    """Remembers, prompt by prompt, internal features of wrong answers and clusters them; a new wrong answer that falls
    into a big cluster pays a penalty, a new kind of mistake pays none, so that the policy leaves its habitual errors.

        label = majority of the clusters of the `neighbours` stored entries of largest cosine similarity (ties: least)
        c = entries with that label (noise: 0);   penalty = min(penalty_coef log(c + 1), max_penalty)
        wrong rows: reward - penalty.   target="right": reward / (1 + penalty) for correct ones instead

    The memory is that before the step; afterwards the target rows' features are added and the prompt's entries are
    clustered anew (HDBSCAN of unit vectors, clusters of two and more; the whole memory is never one cluster).

    Reads rewards [B] (NaN stays NaN, and is not stored), correct [B] where the batch has it, else rewards (right =
    above success_threshold), prompt_key, and meds_features: one vector of fixed length per row, or None. They are the
    last hidden state (`features="hidden"`: one forward pass at the end of the rollout), or a column of the user's, such
    as the paper's: for the answer's first token, the logit of the chosen token at each layer of the last half. Returns
    rewards and meds_penalty [B], and meds_label [B]. A feature of NaN or None costs nothing and is not stored.

    State: features (unit vectors) and labels per prompt, at most `memory` entries each; it grows with the prompts seen.
    `cap_log` is the code's other form, penalty_coef min(log(c + 1), cap_log); `count_noise` follows the code, which
    counts the noise entries.
    """

    paper = "MEDS: Memory-Enhanced Dynamic reward Shaping, arXiv 2604.11297"
    provides = frozenset({"meds_penalty", "meds_label"})

    penalty_coef: float = param(0.1, ge=0, doc="alpha; the code's 0.1 (0.02 for Qwen3-8B)")
    max_penalty: float = param(0.2, ge=0, doc="beta; the code's 0.2 (0.04)")
    neighbours: int = param(3, ge=1, doc="k; the code's 3")
    cap_log: float | None = param(None, gt=0, doc="bound on the logarithm in place of max_penalty; the code's 2")
    count_noise: bool = param(False, doc="noise entries count as a cluster; the code's True")
    target: Literal["wrong", "right"] = param(
        "wrong", doc="whose features are remembered and priced; the paper's wrong"
    )
    features: Literal["hidden", "column"] = param("hidden", doc="where meds_features comes from")
    memory: int = param(256, ge=1, doc="newest entries kept per prompt; ours")
    success_threshold: float = param(0.5, doc="right = above it, in a batch without the column correct")

    stored: dict = state(factory=dict)

    @property
    def requires(self) -> frozenset[str]:
        return frozenset({"meds_features"} if self.features == "column" else ())

    @property
    def capabilities(self) -> frozenset[str]:
        return frozenset({"forward:hidden"} if self.features == "hidden" else ())

    @property
    def idle_hooks(self) -> frozenset[str]:
        return frozenset({"annotate"} if self.features == "column" else ())

    def annotate(self, groups: list[Group], ctx: Context) -> Steps:
        if self.features == "column":
            return
        rollouts = [r for g in groups for r in g.done() if len(r)]
        if not rollouts:
            return
        hidden = yield Forward(rollouts, "hidden")
        for r, state_ in zip(rollouts, hidden, strict=True):
            r.extras["meds_features"] = torch.as_tensor(state_).detach().double().cpu()

    def __call__(self, batch: RolloutBatch) -> Columns:
        rewards, correct = wide(batch.rewards), correctness(self, batch)
        judged = ~torch.isnan(rewards) & ~torch.isnan(correct)
        right = correct > self.success_threshold
        targets = (judged & (right if self.target == "right" else ~right)).tolist()
        features = batch.meds_features if batch.has("meds_features") else [None] * batch.size
        units = [unit(f) if t else None for f, t in zip(features, targets, strict=True)]
        found = [
            self.lookup(u, *self._memory(key)) if u is not None else Lookup(NOT_LOOKED_UP, 0.0)
            for u, key in zip(units, batch.prompt_key, strict=True)
        ]
        penalty = torch.tensor([f.penalty for f in found], dtype=rewards.dtype, device=rewards.device)
        shaped = rewards / (1 + penalty) if self.target == "right" else rewards - penalty
        self.remember(batch.prompt_key, units)
        return {
            "rewards": shaped,
            "meds_penalty": penalty,
            "meds_label": torch.tensor([f.label for f in found], device=rewards.device),
        }

    def lookup(self, feature: Tensor, memory: Tensor, labels: Sequence[int]) -> Lookup:
        """Cluster and penalty of a unit feature [H] against a prompt's memory [M,H] and its labels."""
        if not len(labels):
            return Lookup(NOISE, 0.0)
        similarity = torch.round(memory @ feature, decimals=12)  # equal directions are ties
        near = torch.argsort(-similarity, stable=True)[: self.neighbours].tolist()
        votes = Counter(labels[i] for i in near)
        label = min(votes, key=lambda x: (-votes[x], x))
        size = 0 if label == NOISE and not self.count_noise else sum(x == label for x in labels)
        if self.cap_log is not None:
            return Lookup(label, self.penalty_coef * min(math.log(size + 1), self.cap_log))
        return Lookup(label, min(self.penalty_coef * math.log(size + 1), self.max_penalty))

    def remember(self, keys: Sequence[str], units: Sequence[Tensor | None]) -> None:
        """Add the features to the memory of their prompts and cluster those anew."""
        new: dict[str, list[Tensor]] = {}
        for key, u in zip(keys, units, strict=True):
            if u is not None:
                new.setdefault(key, []).append(u)
        for key, features in new.items():
            old, _ = self._memory(key)
            entries = torch.stack([*old, *features])[-self.memory :]
            self.stored[key] = {"features": entries, "labels": hdbscan(entries)}

    def _memory(self, key: str) -> tuple[Tensor, list[int]]:
        kept: dict[str, Any] | None = self.stored.get(key)
        return (kept["features"], kept["labels"]) if kept is not None else (torch.zeros(0, 0), [])


def unit(feature: Any) -> Tensor | None:
    """The feature scaled to length 1, float64 on the CPU; None where it is unknown."""
    if feature is None:
        return None
    x = torch.as_tensor(feature, dtype=torch.float64).detach().cpu()
    if x.ndim != 1 or not bool(torch.isfinite(x).all()):
        return None
    return x / x.norm().clamp(min=SMALLEST_NORM)
