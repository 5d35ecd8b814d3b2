"""ELPO as one name: the search for the first irrecoverable step, credit on its tree, a wider clip after the step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..advantages._tree import TreeSource
from ..allocation.elpo import ELPO as ELPOAllocator
from ..core.kinds import Method
from ..core.params import param
from ..core.registry import register
from ._parts import spec


@register("method", "elpo")
@dataclass
class ELPOMethod(Method):
    """`advantage: elpo` on the tree that the search for the first irrecoverable step leaves, and `clip: elpo` for the
    steps it found (column critical_turn). With `search` the search is `allocator: elpo`, for hosts whose rollouts call
    tools; without it the column is given.
    """

    paper = (
        "Learning from the Irrecoverable: Error-Localized Policy Optimization for Tool-Integrated LLM Reasoning,"
        " arXiv 2602.09598"
    )

    search: bool = param(False, doc="search with allocator=elpo; False: critical_turn is given")
    total_rollouts: int = param(ELPOAllocator.total_rollouts, doc="allocator")
    first_wave: int = param(ELPOAllocator.first_wave, doc="allocator")
    x_min: float = param(ELPOAllocator.x_min, doc="allocator")
    x_max: float = param(ELPOAllocator.x_max, doc="allocator")
    sharpness: float = param(ELPOAllocator.sharpness, doc="allocator")
    measured_tokens: int = param(ELPOAllocator.measured_tokens, doc="allocator; tokens")
    success_reward: float = param(ELPOAllocator.success_reward, doc="allocator")
    spend_rest: bool = param(ELPOAllocator.spend_rest, doc="allocator")
    branch_weight: float = param(0.5, ge=0, le=1, doc="weight of the comparison with the siblings; the paper's lambda")
    tree: TreeSource = param("forks", doc="the library's forks, or the columns node_ids and node_path")
    eps_low: float = param(0.2, ge=0, lt=1, doc="the range starts at 1 - eps_low; the paper's 0.2")
    eps_high: float = param(0.315, ge=0, doc="the range ends at 1 + eps_high; the paper's 0.315")
    extra: float = param(0.115, ge=0, doc="added to eps_low on critical tokens, up to 1; the paper's 0.115")
    success_threshold: float = param(0.5, doc="clip; a rollout succeeded if its reward is above it")

    def expand(self) -> dict[str, Any]:
        clip = ("eps_low", "eps_high", "extra", "success_threshold")
        update = {
            "advantage": {"name": "elpo", "branch_weight": self.branch_weight, "tree": self.tree},
            "clip": {"name": "elpo", **{name: getattr(self, name) for name in clip}},
            "aggregate": "token_mean",
        }
        return {"allocator": spec(self, ELPOAllocator), **update} if self.search else update
