"""Adaptive importance sampling: as much correction as the batch's mismatch calls for."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

from torch import Tensor

from ..core.batch import RolloutBatch
from ..core.kinds import Columns, Correction
from ..core.params import param
from ..core.registry import register
from ..core.state import state
from ..core.terms import masked
from ._mismatch import mismatch

LOG_CLAMP = 20.0
"""Bound on |logp_old - logp_rollout| in nats."""


class Mismatch(NamedTuple):
    """Diagnostics of a batch: effective sample size in (0, 1], KL (k3 estimate, nats), coefficient of variation."""

    ess: float
    kl: float
    cv: float


@register("correction", "ais")
@dataclass
class AIS(Correction):
    """The plain and the importance-weighted gradient are mixed by one coefficient alpha per batch, which grows with how
    concentrated, divergent and noisy the ratios x = pi_old / pi_rollout are: a harmless mismatch is left alone.

        s1 = (1 - ESS)^power_ess    s2 = (1 - exp(-KL / kl_scale))^power_kl    s3 = (CV / (1 + CV))^power_cv
        alpha = 1 - (1 - s1)(1 - s2)(1 - s3)      or their mean;      weight = 1 - alpha + alpha min(x, upper)

    Reads logp_old, logp_rollout, response_mask [B,T] of the whole batch; returns weight [B,T], 0 where masked, at least
    float32; alpha, ess, kl and cv, numbers. A token the engine could not score (NaN) has x = 1. State: alpha of the
    last step, for `ema`; a batch without model tokens leaves it as it was.

    The paper names the three diagnostics and the mixing; the formulas of the scores, their combination and all
    constants are reconstructions. ESS = 1 / (1 + CV^2): both are kept since the paper has both.
    """

    paper = "Adaptive importance sampling for low-precision rollouts, arXiv 2605.13907"
    requires = frozenset({"logp_old", "logp_rollout"})
    scope = "batch"

    kl_scale: float = param(0.05, gt=0, doc="KL in nats at which s2 is 1 - 1/e")
    power_ess: float = param(1.0, gt=0, doc="exponent of the reliability score")
    power_kl: float = param(1.0, gt=0, doc="exponent of the divergence score")
    power_cv: float = param(1.0, gt=0, doc="exponent of the variance score")
    upper: float = param(2.0, gt=0, doc="largest importance weight")
    ema: float = param(0.0, ge=0, lt=1, doc="weight of the last step's alpha (decay); 0: no smoothing")
    combine: Literal["noisy_or", "mean"] = param("noisy_or", doc="how the three scores become alpha")
    alpha: float | None = state(None)

    def __call__(self, batch: RolloutBatch) -> Columns:
        d = self.log_ratio(batch)
        found = self._diagnosis(d, batch)
        if bool(batch.lengths.any()):
            alpha = self.mixing(found)
            self.alpha = alpha if self.alpha is None else self.ema * self.alpha + (1 - self.ema) * alpha
        alpha = self.alpha or 0.0
        weight = (1 - alpha) + alpha * d.exp().clamp_(max=self.upper)
        return {"weight": masked(weight, batch.response_mask), "alpha": alpha, **found._asdict()}

    def log_ratio(self, batch: RolloutBatch) -> Tensor:
        """log x [B,T], 0 where unknown or masked."""
        return mismatch(batch)[0].clamp_(-LOG_CLAMP, LOG_CLAMP)

    def diagnose(self, batch: RolloutBatch) -> Mismatch:
        """ESS, KL and CV of the ratios over the model tokens; (1, 0, 0) without any."""
        return self._diagnosis(self.log_ratio(batch), batch)

    def _diagnosis(self, d: Tensor, batch: RolloutBatch) -> Mismatch:
        n = batch.lengths.sum()
        if not bool(n):
            return Mismatch(1.0, 0.0, 0.0)
        x = masked(d.exp(), batch.response_mask)
        mean = x.sum() / n
        ess = mean.square() / (x.square().sum() / n)
        kl = (d.expm1() - d).sum() / n  # 0 where masked, as d is
        cv = (masked(x - mean, batch.response_mask).square().sum() / n).sqrt() / mean
        return Mismatch(float(ess), float(kl), float(cv))

    def mixing(self, found: Mismatch) -> float:
        """alpha in [0, 1] of one batch, before smoothing."""
        s1 = max(0.0, 1 - found.ess) ** self.power_ess
        s2 = max(0.0, -math.expm1(-found.kl / self.kl_scale)) ** self.power_kl
        s3 = (found.cv / (1 + found.cv)) ** self.power_cv
        alpha = 1 - (1 - s1) * (1 - s2) * (1 - s3) if self.combine == "noisy_or" else (s1 + s2 + s3) / 3
        return min(1.0, max(0.0, alpha))
