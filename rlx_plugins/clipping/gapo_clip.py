"""GAPO: the upper clip bound of a success is the wider, the rarer successes are in its group."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from ..core.context import Context
from ..core.errors import ConfigError
from ..core.kinds import Clip
from ..core.params import param
from ..core.registry import register
from ..core.terms import PolicyTerms, clip_fraction, clipped_surrogate
from ..core.trajectory import Group

RANGES = {"sequence": (3e-3, 5e-3), "token": (0.2, 0.28)}
"""The paper's (eps_low, eps_high_max) for each level of the ratio; distilled reasoning models took (7e-5, 3e-4)."""


@register("clip", "gapo_clip")
@dataclass
class GAPOClip(Clip):
    """A success that is rare in its group may move up to `eps_high_max`, one in a group that always succeeds only
    `eps_low`; failures keep the narrow bound. With c successes among the k scored rollouts of the group:

        eps_high = eps_low + (eps_high_max - eps_low) (k - c) / (k - 1)   for a success, eps_low otherwise and for k = 1
        L = max(-A r, -A clip(r, 1 - eps_low, 1 + eps_high))

    Reads ratio and advantages [B,T] and the column gapo_eps_high [B], which it writes at the end of the rollout from
    the raw rewards of complete groups: whatever the micro-batch, k and c are the group's. Rollouts without a reward
    count in neither.

    The bounds are made for rewards centred in their group without dividing by the spread, on GSPO's sequence ratio and
    a mean over rows; `method: gapo` sets all of that up. The 0.5 that splits rewards which are not 0/1 is
    `success_threshold`. Another paper's GAPO, with a median baseline, is a different method.
    """

    paper = "GAPO: group-adaptive clipping, arXiv 2609.00444"
    provides = frozenset({"gapo_eps_high"})

    level: Literal["sequence", "token"] = param("sequence", doc="level of the ratio; the paper's better one: sequence")
    eps_low: float | None = param(None, ge=0, doc="narrow radius; None: the paper's 3e-3 (sequence), 0.2 (token)")
    eps_high_max: float | None = param(None, ge=0, doc="widest radius; None: the paper's 5e-3 (sequence), 0.28 (token)")
    success_threshold: float = param(0.5, doc="a rollout succeeded if its reward is above it")

    @property
    def fixes(self) -> dict[str, str]:
        return {"ratio": self.level}

    @property
    def range(self) -> tuple[float, float]:
        """(eps_low, eps_high_max) with the paper's values where none were given."""
        low, high = RANGES[self.level]
        return low if self.eps_low is None else self.eps_low, high if self.eps_high_max is None else self.eps_high_max

    def check(self) -> None:
        low, high = self.range
        if high < low:
            raise ConfigError(f"clip gapo_clip.eps_high_max: must be >= eps_low ({low:g}), got {high:g}")

    def annotate(self, groups: list[Group], ctx: Context) -> None:
        low, high = self.range
        for group in groups:
            succeeded = {r.slot: r.reward > self.success_threshold for r in group.rollouts if r.scorable}
            k, c = len(succeeded), sum(succeeded.values())
            wide = low + (high - low) * (k - c) / (k - 1) if k > 1 else low
            for r in group.rollouts:
                r.extras["gapo_eps_high"] = wide if succeeded.get(r.slot, False) else low

    def __call__(self, terms: PolicyTerms) -> Any:
        low, high = 1 - self.range[0], 1 + terms.batch.gapo_eps_high[:, None]
        loss = clipped_surrogate(terms.ratio, terms.advantages, low, high)
        return loss, {"clipped": clip_fraction(terms.ratio, terms.advantages, low, high, terms.mask)}
