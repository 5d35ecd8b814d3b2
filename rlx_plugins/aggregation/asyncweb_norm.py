"""AsyncWebRL's normaliser: a constant instead of the episode's number of steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ..core.batch import RolloutBatch
from ..core.kinds import Aggregate, Columns
from ..core.params import param
from ..core.registry import register
from ..core.segments import Segments
from ..core.terms import masked


@register("aggregate", "asyncweb_norm")
@dataclass
class AsyncWebNorm(Aggregate):
    """For agents whose every step is a row: all rows are divided by the same constant k. Dividing by the number of
    steps of the episode, as usual, lets long failures weigh less per token, so that verbosity goes unpunished.

    A row's scale is 1/k (`mode="constant"`), or 1/n with n the rows of its episode that have model tokens
    ("trajectory"). weight [B,T] = scale where mask and exp(logp_old - logp_rollout) <= ratio_cap, else 0; count [B] =
    tokens of the row, the capped ones included. A token the engine could not score passes the cap.

    Reads logp_old and logp_rollout [B,T] for the cap (`ratio_cap=None`: neither) and, for "trajectory", the column
    episode [B]: which rows are steps of one episode. The advantage is the unscaled z-score of the episode, as
    `advantage: {name: grpo, ddof: 0}` gives it where an episode is one row: the scale is in the weights only. k acts
    like a factor of the learning rate; keep it during a run.
    """

    paper = "AsyncWebRL, arXiv 2606.05597"

    mode: Literal["constant", "trajectory"] = param("constant", doc="divide by k (the paper), or by the steps")
    k: float = param(10.0, gt=0, doc="constant divisor in steps; the paper's horizon of easy tasks")
    ratio_cap: float | None = param(5.0, gt=1, doc="tokens above it are dropped as stale; the paper's 5; None: no cap")

    @property
    def requires(self) -> frozenset[str]:
        capped = {"logp_old", "logp_rollout"} if self.ratio_cap is not None else set()
        return frozenset(capped | ({"episode"} if self.mode == "trajectory" else set()))

    def __call__(self, batch: RolloutBatch, mask: Tensor) -> Columns:
        weight = self.row_scale(batch, mask)[:, None].expand(mask.shape)
        return {"weight": masked(weight, mask & self.fresh(batch, mask)), "count": mask.sum(1).to(batch.dtype)}

    def row_scale(self, batch: RolloutBatch, mask: Tensor) -> Tensor:
        """c [B]: what every token of the row weighs."""
        if self.mode == "constant":
            return torch.full((batch.size,), 1 / self.k, dtype=batch.dtype, device=mask.device)
        return 1 / self.steps(batch, mask)

    def steps(self, batch: RolloutBatch, mask: Tensor) -> Tensor:
        """n [B]: rows with model tokens in the row's episode, at least 1."""
        episodes = Segments(batch.episode)
        return episodes.spread(episodes.sum(mask.any(1).to(batch.dtype))).clamp(min=1)

    def fresh(self, batch: RolloutBatch, mask: Tensor) -> Tensor:
        """[B,T] bool: tokens within the staleness cap."""
        if self.ratio_cap is None:
            return mask
        return ~((masked(batch.logp_old, mask) - masked(batch.logp_rollout, mask)).exp() > self.ratio_cap)
