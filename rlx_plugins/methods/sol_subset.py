"""Sol-RL for language models: the contrastive subset of a low-precision pool, rescored by the trainer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..core.kinds import Method
from ..core.params import param
from ..core.registry import register


@register("method", "sol_subset")
@dataclass
class SolSubsetMethod(Method):
    """`allocator: sol_subset` samples the pool and keeps its extremes; `correction: tis` weighs the low-precision
    engine's tokens by the trainer's probability over the engine's.
    """

    paper = "Sol-RL: speed-of-light reinforcement learning, arXiv 2604.06916"

    pool: int = param(96, ge=1, doc="candidates per prompt; the paper's 96")
    k_top: int = param(12, ge=1, doc="of the highest rewards; the paper's 12")
    k_bottom: int = param(12, ge=1, doc="of the lowest rewards; the paper's 12")
    upper: float = param(2.0, gt=0, doc="largest importance weight; that of tis")

    def expand(self) -> dict[str, Any]:
        own = self.params()
        return {
            "allocator": {"name": "sol_subset", **{name: own[name] for name in ("pool", "k_top", "k_bottom")}},
            "correction": {"name": "tis", "upper": self.upper},
        }
