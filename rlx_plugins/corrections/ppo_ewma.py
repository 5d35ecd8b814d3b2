"""PPO-EWMA for stale rollouts: an averaged policy anchors the update, tokens too far from it carry no loss."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from ..core.batch import RolloutBatch
from ..core.errors import ConfigError
from ..core.kinds import Columns, Correction
from ..core.params import param
from ..core.registry import register
from ..core.state import state
from ..core.terms import masked, masked_mean

LOG_CLAMP = 20.0
"""Bound on |log ratio| in nats."""


class Discrepancy(NamedTuple):
    """[B,T]: pi_prox / pi_rollout, whether it is inside the band, and whether the clip leaves the token's gradient."""

    ratio: Tensor
    ok: Tensor
    unclipped: Tensor


@register("correction", "ppo_ewma")
@dataclass
class PPOEWMA(Correction):
    """The old log-probs of stale tokens are missing in asynchronous training; a moving average of the weights whose
    window fits the staleness takes their place as the proximal policy. Tokens whose engine probability is too far from
    the averaged policy's carry no loss, and where too few tokens are left, the average starts anew at the current
    weights.

        r_d = exp(logp_prox - logp_rollout),   ok = d_low <= r_d <= d_high;   weight = ok, or r_d ok
        active = share of the tokens that are ok and unclipped, with r_s = exp(logp_old - logp_prox) in the clip range
        reset = active < min_active

    Reads logp_prox, logp_rollout, logp_old, advantages, response_mask [B,T]; returns weight [B,T], at least float32,
    and active_fraction (a number). A token of unknown engine log-prob is not ok. State: the last active fraction, from
    which `reset_proximal` tells the host, once the step is over, to start the average anew; a batch without model
    tokens asks for nothing.

    The average is the host's (`ProximalAverage` below; decay W/(W+2) for a staleness of W updates), the ratio over
    logp_prox and PPO's asymmetric clip are those of `method: ppo_ewma`. Active tokens are counted once per step, with
    the policy at its start. A host that can't reset its average runs this with min_active 0. Mask or weight and the
    band are reconstructions.
    """

    paper = "Missing old logits in asynchronous RL, arXiv 2605.12070"
    requires = frozenset({"logp_prox", "logp_rollout", "logp_old"})
    corrects = ("logp_prox", "logp_rollout")
    scope = "batch"

    weight: Literal["mask", "weight"] = param("mask", doc="what a token inside the band weighs: 1, or r_d")
    d_low: float = param(0.5, ge=0, doc="smallest r_d; reconstructed")
    d_high: float = param(2.0, gt=0, doc="largest r_d; reconstructed")
    min_active: float = param(0.9, ge=0, le=1, doc="active share below which the average starts anew; the paper's tau")
    eps_low: float = param(0.2, ge=0, doc="the clip range starts at 1 - eps_low; that of the clip")
    eps_high: float = param(0.28, ge=0, doc="the clip range ends at 1 + eps_high; that of the clip")
    active: float | None = state(None)

    @property
    def masks_only(self) -> bool:
        return self.weight == "mask"

    @property
    def capabilities(self) -> frozenset[str]:
        return frozenset({"reset_prox"} if self.min_active > 0 else ())

    @property
    def reset_proximal(self) -> bool:
        """Whether the host is to start its average anew from the current weights after this step."""
        return self.active is not None and self.active < self.min_active

    def check(self) -> None:
        if self.d_low > self.d_high:
            raise ConfigError(f"correction ppo_ewma.d_low: must be <= d_high ({self.d_high:g}), got {self.d_low:g}")

    def __call__(self, batch: RolloutBatch) -> Columns:
        mask, found = batch.response_mask, self.discrepancy(batch)
        active = float(masked_mean((found.ok & found.unclipped).to(found.ratio.dtype), mask))
        self.active = active if bool(mask.any()) else None
        kept = torch.ones_like(found.ratio) if self.weight == "mask" else found.ratio
        return {"weight": masked(kept, found.ok), "active_fraction": active}

    def discrepancy(self, batch: RolloutBatch) -> Discrepancy:
        """The band and the clip for every token of the batch."""
        mask = batch.response_mask
        wide = torch.promote_types(batch.logp_prox.dtype, torch.float32)
        old, prox, engine = (batch[n].to(wide) for n in ("logp_old", "logp_prox", "logp_rollout"))
        d = prox - engine
        known = mask & (d.abs() < torch.inf)
        ratio = masked(d, known).clamp(-LOG_CLAMP, LOG_CLAMP).exp()
        step = (old - prox).clamp(-LOG_CLAMP, LOG_CLAMP).exp()
        up, down = batch.advantages > 0, batch.advantages < 0
        clipped = (up & (step > 1 + self.eps_high)) | (down & (step < 1 - self.eps_low))
        return Discrepancy(ratio, known & (ratio >= self.d_low) & (ratio <= self.d_high), ~clipped)


class ProximalAverage:
    """The bias-corrected moving average of the weights: sum_k decay^(t-k) theta_k / sum_k decay^(t-k).

    Z <- decay Z + 1,  mean <- mean + (theta - mean) / Z  after every update; `reset` starts anew at the given weights.
    Weights are lists of tensors in one order; the mean is float32 at least. `decay_for(W)` for a staleness of W.
    With `weights` it starts as their mean, `settled`: as if they had been the weights for long, which makes it the
    plain moving average decay * mean + (1 - decay) * theta until it is reset.
    """

    def __init__(self, decay: float, weights: Sequence[Tensor] = (), *, settled: bool = False):
        self.decay, self.mean = decay, [_own(w) for w in weights]
        self.z = 1 / (1 - decay) if settled else float(bool(weights))

    @staticmethod
    def decay_for(window: float) -> float:
        """W / (W + 2): the mean age of the average tends to W / 2 updates; 0 for W = 0, the current weights."""
        return window / (window + 2)

    @torch.no_grad()
    def update(self, weights: Sequence[Tensor]) -> None:
        """After an optimizer step."""
        self.z = self.decay * self.z + 1
        if not self.mean:
            self.mean = [_own(w) for w in weights]
        for mean, w in zip(self.mean, weights, strict=True):
            mean.lerp_(w.detach().to(mean), 1 / self.z)  # the host may have moved the weights elsewhere

    def reset(self, weights: Sequence[Tensor]) -> None:
        """Forget the past: the mean is the given weights."""
        self.mean, self.z = [_own(w) for w in weights], 1.0

    def state_dict(self) -> dict[str, Any]:
        return {"z": self.z, "mean": [w.clone() for w in self.mean]}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Restore; a checkpoint without `z` starts anew at its mean."""
        self.z, self.mean = float(saved.get("z", 1.0)), [w.clone() for w in saved["mean"]]


def _own(w: Tensor) -> Tensor:
    return w.detach().to(torch.promote_types(w.dtype, torch.float32), copy=True)
