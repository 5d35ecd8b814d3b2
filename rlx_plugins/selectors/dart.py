"""DART: of a long agent trajectory, train the steps in which the policy was undecided."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from ..core.batch import RolloutBatch
from ..core.errors import ConfigError
from ..core.kinds import Columns, Selector
from ..core.params import param
from ..core.registry import register
from ..core.segments import Segments
from ..core.terms import masked
from ._steps import Steps, quantile_by_group

LOG_CLAMP = 20.0
"""Bound on |logp_old - logp_rollout| in nats."""
TIE = 1e-12
UNRECORDED = 1e-9
"""A row whose engine log-probs are all smaller than this was stored without them."""


class Undecided(NamedTuple):
    """step_entropy and chosen (bool) [S] of the steps in order, threshold [B] of each row (NaN: none), keep [B,T]."""

    step_entropy: Tensor
    threshold: Tensor
    chosen: Tensor
    keep: Tensor


@register("selector", "dart")
@dataclass
class DART(Selector):
    """Most steps of a long trajectory are routine. Only those whose mean token entropy is in the upper part of their
    group carry loss, and the mismatch between trainer and engine is corrected by a weight of at most 1.

        H(b, s) = mean entropy over the model tokens of step s;   tau = quantile of all H of the group (linear)
        keep = H >= tau;   weight = keep min(exp(logp_old - logp_rollout), cap)

    Reads entropy (before the update), turn_ids (-1 = not the model's), logp_old, logp_rollout [B,T] and group [B];
    returns weight [B,T] and the share kept_steps (a number). Whole steps are kept or dropped; ties are kept. Unknown
    engine log-probs (NaN, or a row of zeros, which the release writes where none were recorded) give weight 1. The
    loss's denominator stays that of all tokens. A `correction` that weighs for the same mismatch is refused when the
    batch arrives, unless `cap: null` turns the weight off here.

    The released code has the step filter commented out, and would take dropped tokens out of the mask.
    """

    paper = "DART: efficient multi-turn RL for GUI agents, arXiv 2509.23866"
    scope = "group"

    drop_quantile: float = param(0.2, ge=0, le=1, doc="share of steps below the threshold; the paper's 0.2")
    cap: float | None = param(1.0, gt=0, doc="largest importance weight; the paper's 1.0; None: no weight")
    pool: Literal["group", "batch"] = param("group", doc="steps that share a threshold; the paper's group")

    @property
    def requires(self) -> frozenset[str]:
        return frozenset({"entropy", "turn_ids"} | ({"logp_old", "logp_rollout"} if self.cap is not None else set()))

    def __call__(self, batch: RolloutBatch) -> Columns:
        found = self.undecided(batch)
        steps = found.step_entropy.numel()
        return {
            "weight": masked(self.importance(batch), found.keep),
            "kept_steps": int(found.chosen.sum()) / max(steps, 1),
        }

    def undecided(self, batch: RolloutBatch) -> Undecided:
        """Entropy of every step, threshold of every row, and the tokens of the steps above it."""
        mask = batch.response_mask
        steps = Steps.of(batch.turn_ids, mask)
        entropy = steps.mean(masked(batch.entropy, mask))
        of_row = batch.groups.index if self.pool == "group" else torch.zeros_like(batch.groups.index)
        thresholds = torch.full((int(of_row.max()) + 1,), torch.nan, dtype=entropy.dtype, device=entropy.device)
        groups = Segments(of_row[steps.row])
        thresholds[groups.ids] = quantile_by_group(groups, entropy, self.drop_quantile)
        threshold = thresholds[of_row]
        chosen = entropy >= threshold[steps.row] - TIE
        return Undecided(entropy, threshold, chosen, steps.spread(chosen))

    def importance(self, batch: RolloutBatch) -> Tensor:
        """min(pi_old / pi_rollout, cap) [B,T]; 1 everywhere without a cap."""
        mask = batch.response_mask
        if self.cap is None:
            return torch.ones(mask.shape, dtype=batch.dtype, device=mask.device)
        if batch.has("correction_weight"):
            before = batch.correction_weight
            if bool((mask & (before != 0) & (before != 1)).any()):
                raise ConfigError(
                    "selector dart weighs tokens for the mismatch of engine and trainer, and so does the correction;"
                    " drop the correction, or set selector dart.cap to null"
                )
        engine = masked(batch.logp_rollout, mask)
        recorded = (engine.abs() >= UNRECORDED).any(1, keepdim=True)
        d = masked(batch.logp_old, mask) - engine
        d = masked(d, mask & recorded & torch.isfinite(d)).to(batch.dtype)
        return d.clamp(-LOG_CLAMP, LOG_CLAMP).exp().clamp(max=self.cap)
