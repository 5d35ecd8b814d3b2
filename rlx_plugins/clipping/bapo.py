"""BAPO: clip bounds searched before every loss, so that positive and negative advantages contribute in balance."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from ..core.errors import ConfigError
from ..core.kinds import Clip
from ..core.params import param
from ..core.registry import register
from ..core.terms import PolicyTerms, clip_fraction, clipped_surrogate, masked

MOST_STEPS = 1000
"""Longest search along one bound; more is a mistyped step."""


class Bounds(NamedTuple):
    """Where the search ended, scalars: the ratio bounds, the balance there, and the steps it took."""

    low: Tensor
    high: Tensor
    balance: Tensor
    steps: Tensor


@register("clip", "bapo")
@dataclass
class BAPO(Clip):
    """PPO's clip with bounds that move: in small steps the lower bound rises, then the upper one, until the tokens of
    positive advantage contribute `target` times as much as those of negative advantage, or the bounds are at their
    maxima. The result is clipped as in PPO, with a dual clip.

    For bounds (low, high), detached and summed over all ranks:

        P(high) = sum over A >= 0 of min(r, high) A        N(low) = sum over A < 0 of max(r, low) |A|
        balance = P / (N + eps), infinite when N = 0

    Reads ratio and advantages [B,T]; returns the token loss [B,T] and the metrics clip_low, clip_high, pos_neg_ratio,
    steps. P depends on the high bound only and N on the low one, so one all-reduce of all candidates' sums lets every
    rank choose alone; every rank must compute the loss equally often in a step.

    Bounds, target and accounting are those of the released code. The paper's text gives other ranges (0.6-0.9 and
    1.2-3.0) and speaks of P/(P+N) >= 0.5, which is target 1. In the code's accounting a higher low bound makes N
    larger, so the lower search always runs to its end; `accounting="gradient"` counts only tokens that keep their
    gradient, which is what raising the bound is meant for. The search runs on each micro-batch, as published; rows cut
    short by a selector count with the tokens they have left.
    """

    paper = "BAPO: balanced policy optimization with adaptive clipping, arXiv 2510.18927"
    scope = "micro"

    target: float = param(1.0, ge=0, doc="P/N to reach; the code's 1.0; 0: no search")
    low_start: float = param(0.6, ge=0, doc="lower ratio bound at the start; the code's 0.6")
    low_max: float = param(0.8, ge=0, doc="where the lower bound stops; the code's 0.8")
    low_step: float = param(0.05, ge=0, doc="0: the lower bound stays; the code's 0.05")
    high_start: float = param(1.2, ge=0, doc="upper ratio bound at the start; the code's 1.2")
    high_max: float = param(2.0, ge=0, doc="where the upper bound stops; the code's 2.0")
    high_step: float = param(0.05, ge=0, doc="0: the upper bound stays; the code's 0.05")
    eps: float = param(1e-8, ge=0, doc="added to N; the code's 1e-8")
    dual_clip: float | None = param(3.0, gt=1, doc="bound for negative advantages; verl's 3.0; None: off")
    order: Literal["low_first", "high_first"] = param("low_first", doc="which bound moves first; the code's low_first")
    accounting: Literal["value", "gradient"] = param("value", doc="a clipped token counts its clipped value, or 0")

    def check(self) -> None:
        for side in ("low", "high"):
            start, stop, step = (getattr(self, f"{side}_{name}") for name in ("start", "max", "step"))
            if start > stop:
                raise ConfigError(f"clip bapo.{side}_start: must be <= {side}_max ({stop:g}), got {start:g}")
            if step > 0 and stop - start > MOST_STEPS * step:
                raise ConfigError(f"clip bapo.{side}_step: {step:g} makes more than {MOST_STEPS} steps to {stop:g}")
        if self.low_max > self.high_start:
            raise ConfigError(f"clip bapo.low_max: must be <= high_start ({self.high_start:g}), got {self.low_max:g}")

    def __call__(self, terms: PolicyTerms) -> Any:
        found = self.search(terms)
        loss = clipped_surrogate(terms.ratio, terms.advantages, found.low, found.high, self.dual_clip)
        return loss, {
            "clip_low": found.low,
            "clip_high": found.high,
            "pos_neg_ratio": found.balance,
            "steps": found.steps,
            "clipped": clip_fraction(terms.ratio, terms.advantages, found.low, found.high, terms.mask),
        }

    def search(self, terms: PolicyTerms) -> Bounds:
        """The bounds for this micro-batch of every rank."""
        ratio = terms.ratio.detach()
        ratio = ratio.to(torch.promote_types(ratio.dtype, torch.float32))
        lows = _candidates(self.low_start, self.low_max, self.low_step, ratio)
        highs = _candidates(self.high_start, self.high_max, self.high_step, ratio)
        sums = terms.all_reduce(torch.cat(self.contributions(ratio, terms, lows, highs)))
        positive, negative = sums[: len(highs)], sums[len(highs) :, None]
        balance = torch.where(negative > 0, positive / (negative + self.eps), torch.inf)  # [low, high]
        if self.order == "low_first":
            low = _first(balance[:, 0] >= self.target)
            high = _first(_at(balance, low) >= self.target)
        else:
            high = _first(balance[0] >= self.target)
            low = _first(_at(balance.T, high) >= self.target)
        return Bounds(_at(lows, low), _at(highs, high), _at(_at(balance, low), high), low + high)

    def contributions(self, ratio: Tensor, terms: PolicyTerms, lows: Tensor, highs: Tensor) -> tuple[Tensor, Tensor]:
        """P for every candidate of the high bound, N for every candidate of the low one: [len(highs)], [len(lows)]."""
        adv = masked(terms.advantages, terms.mask).to(ratio.dtype)
        up = adv > 0
        if self.accounting == "gradient" and self.dual_clip is not None:
            adv = masked(adv, up | (ratio <= self.dual_clip))
        place = torch.where(
            up, torch.bucketize(ratio, highs), len(highs) + 1 + torch.bucketize(ratio, lows, right=True)
        )
        plain, moved = _sums(place, torch.stack([adv.flatten(), (ratio * adv).flatten()]), len(highs) + len(lows) + 2)
        inside, beyond = _at_or_below(moved[: len(highs) + 1]), _above(plain[: len(highs) + 1])
        under, above = _at_or_below(-plain[len(highs) + 1 :]), _above(-moved[len(highs) + 1 :])
        if self.accounting == "value":
            inside, above = inside + highs * beyond, above + lows * under
        return inside.to(ratio.dtype), above.to(ratio.dtype)


def _candidates(start: float, stop: float, step: float, like: Tensor) -> Tensor:
    """start, start + step, ... up to and with `stop`, in the dtype of the ratio; the device is not waited for."""
    n, bound = 1, start
    while step > 0 and bound < stop:
        n, bound = n + 1, min(bound + step, stop)
    return (start + step * torch.arange(n, dtype=like.dtype, device=like.device)).clamp(max=stop)


def _sums(place: Tensor, values: Tensor, places: int) -> Tensor:
    """[2, places]: the sums of `values` [2,N] over the tokens at each place [B,T].

    Summed in float64, so that the order in which a device adds does not move the outcome.
    """
    empty = torch.zeros(len(values), places, dtype=torch.float64, device=values.device)
    return empty.index_add_(1, place.flatten(), values.to(torch.float64))


def _at_or_below(x: Tensor) -> Tensor:
    """For every bound: the sum over the tokens at or below it, of sums `x` by the number of bounds a token exceeds."""
    return x.cumsum(0)[:-1]


def _above(x: Tensor) -> Tensor:
    """For every bound: the sum over the tokens above it."""
    return x.flip(0).cumsum(0).flip(0)[1:]


def _first(reached: Tensor) -> Tensor:
    """Index of the first candidate that reached the target, the last one if none did."""
    return (~reached).long().cumprod(0).sum().clamp(max=len(reached) - 1)


def _at(x: Tensor, index: Tensor) -> Tensor:
    """x[index] for an index that lives on the device."""
    return x.index_select(0, index.reshape(1)).squeeze(0)
