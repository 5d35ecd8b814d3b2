"""What a loss-phase plug-in sees of one micro-batch, and the surrogates several of them share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .batch import RolloutBatch


def _alone(x: Tensor) -> Tensor:
    return x


@dataclass
class PolicyTerms:
    """One micro-batch of the loss phase; only logp_new, entropy and `from_logits` results carry gradient.

    logp_new, entropy   [B,T] current policy: log-probability of each token, entropy in nats (None unless required)
    advantages, ratio   [B,T] set before the parts that read them are called
    batch               all columns of the micro-batch
    logits              columns made by `from_logits` hooks, by name
    all_reduce          sums a tensor over all data-parallel ranks (identity on one)
    """

    logp_new: Tensor
    batch: RolloutBatch
    entropy: Tensor | None = None
    advantages: Tensor = field(default_factory=lambda: torch.empty(0))
    ratio: Tensor = field(default_factory=lambda: torch.empty(0))
    logits: dict[str, Tensor] = field(default_factory=dict)
    all_reduce: Callable[[Tensor], Tensor] = _alone

    @property
    def mask(self) -> Tensor:
        """[B,T] bool: model tokens that count."""
        return self.batch.response_mask

    def log_ratio(self, denominator: str = "logp_old", clamp: float | None = None) -> Tensor:
        """logp_new - logp_<denominator> [B,T], 0 where masked, clamped to +-`clamp` if given.

        Where an engine's log-prob is unknown (NaN), the step-start log-prob stands in for it, so the weight is 1 at the
        first update. A batch without the column logp_behavior has no row whose behaviour differs from logp_old.
        """
        if denominator == "logp_behavior" and not self.batch.has(denominator):
            denominator = "logp_old"
        reference = self.batch[denominator]
        if denominator != "logp_old" and self.batch.has("logp_old"):
            reference = torch.where(torch.isnan(reference), self.batch.logp_old, reference)
        d = masked(self.logp_new - reference.to(self.logp_new.dtype), self.mask)
        return d if clamp is None else d.clamp(-clamp, clamp)


def masked(x: Tensor, mask: Tensor) -> Tensor:
    """`x` where `mask`, exactly 0 elsewhere: selected, so garbage under the mask touches neither value nor gradient."""
    return torch.where(mask, x, torch.zeros((), dtype=x.dtype, device=x.device))


def masked_mean(x: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Mean of `x` over the entries of `mask` (over all of them, or along `dim`); 0 where there are none."""
    dims = tuple(range(mask.ndim)) if dim is None else dim
    n = mask.sum(dims, dtype=torch.int32)  # bools summed as int64, the default, are slow on a CPU
    return masked(x, mask).sum(dims) / n.clamp(min=1).to(x.dtype)


def clipped_surrogate(
    ratio: Tensor,
    advantages: Tensor,
    low: Tensor | float,
    high: Tensor | float,
    dual_clip: Tensor | float | None = None,
) -> Tensor:
    """PPO's pessimistic token loss max(-A r, -A clip(r, low, high)) [B,T] with absolute ratio bounds.

    `dual_clip` c > 1 bounds the loss of a negative advantage by -A c (arXiv 1912.09729).
    """
    against = -advantages
    if isinstance(low, Tensor) or isinstance(high, Tensor):
        bounded = ratio.clamp(_like(low, ratio), _like(high, ratio))
    else:
        bounded = ratio.clamp(low, high)
    loss = torch.maximum(against * ratio, against * bounded)
    if dual_clip is None:
        return loss
    limit = torch.where(advantages < 0, against * _like(dual_clip, ratio), torch.inf)
    return loss.clamp(max=limit.to(loss.dtype))


def _like(x: Tensor | float, ratio: Tensor) -> Tensor:
    return x.to(ratio.dtype) if isinstance(x, Tensor) else torch.full((), x, dtype=ratio.dtype, device=ratio.device)


def clip_fraction(ratio: Tensor, advantages: Tensor, low: Tensor | float, high: Tensor | float, mask: Tensor) -> Tensor:
    """Share of the mask's tokens whose gradient the pessimistic clip removes (detached)."""
    r = ratio.detach()
    cut = torch.where(advantages > 0, r > high, (r < low) & (advantages < 0)) & mask
    return cut.sum(dtype=r.dtype) / mask.sum(dtype=torch.int32).clamp(min=1)
