"""DATPO as one name: a tree search, block advantages on the tree, and a mean over its unique tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..advantages._tree import TreeSource
from ..allocation.datpo import DATPO as DATPOAllocator
from ..core.kinds import Method
from ..core.params import param
from ..core.registry import register
from ._parts import spec


@register("method", "datpo")
@dataclass
class DATPOMethod(Method):
    """`advantage: datpo`, PPO's clip and `aggregate: datpo`, which counts a block that several rows share once. With
    `sentence_ends` the tree search is `allocator: datpo`; without, the tree is another allocator's or given.
    """

    paper = "Difficulty-Adaptive Sentence-entropy-guided Tree-structured Policy Optimization, arXiv 2609.08650"

    sentence_ends: tuple[int, ...] | None = param(None, doc="allocator; token ids; None: no allocator")
    first_wave: int = param(DATPOAllocator.first_wave, doc="allocator")
    max_forks: int = param(DATPOAllocator.max_forks, doc="allocator")
    max_branches: int = param(DATPOAllocator.max_branches, doc="allocator")
    reward_min: float = param(DATPOAllocator.reward_min, doc="allocator")
    reward_max: float = param(DATPOAllocator.reward_max, doc="allocator")
    bonus_start: float = param(0.2, ge=0, doc="weight of the diversity bonus at the first step; the paper's alpha_0")
    bonus_end: float = param(0.0, ge=0, doc="weight of the bonus at the last step; the paper's 0")
    tree: TreeSource = param("forks", doc="blocks of the library's forks, or columns that rollout code returns")
    eps_low: float = param(0.2, ge=0, doc="the clip range starts at 1 - eps_low; the paper's 0.2")
    eps_high: float = param(0.2, ge=0, doc="the clip range ends at 1 + eps_high; the paper's 0.2")

    def expand(self) -> dict[str, Any]:
        own = self.params()
        update = {
            "advantage": {"name": "datpo", **{name: own[name] for name in ("bonus_start", "bonus_end", "tree")}},
            "clip": {"name": "ppo", "eps_low": self.eps_low, "eps_high": self.eps_high},
            "aggregate": "datpo",
        }
        return update if self.sentence_ends is None else {"allocator": spec(self, DATPOAllocator), **update}
