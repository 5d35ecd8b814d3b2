"""LEAD: correctness and efficiency normalised apart, mixed by weights that follow training."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ..core.batch import RolloutBatch
from ..core.errors import DataError
from ..core.kinds import Advantage, Columns
from ..core.params import param
from ..core.registry import register
from ..core.segments import Segments, counted, zscore
from ..core.state import state
from ..core.terms import masked
from ._component_weights import scorable_components
from ._whitened import whitened

COMPONENTS = ("correct", "efficiency")
GROUP_EPS = 1e-6
SPREAD_EPS = 1e-8


@register("advantage", "lead")
@dataclass
class LEAD(Advantage):
    """Mixes the group z-scores of correctness and efficiency, giving more weight to what is unstable and improvable.

    A component's share is its coefficient of variation, scaled by the room it has left; the weights are smoothed over
    steps, correctness has a floor, and the mix is whitened over the batch's tokens.

    CV_x = sd_x / (|mu_x| + eps) with mu, sd over groups by the law of total variance (efficiency: correct rows only);
    d_x = CV_x / (CV_c + CV_e + eps) * P_x,   P_c = (1 - mu_c)^a,   P_e = (1 - (mu_e + 1)/2)^a;
    W <- decay W + (1 - decay) d / (d_c + d_e + eps);   w_c = max(W_c, min_correct_weight), w_e = 1 - w_c;
    A = whiten(w_c z(c) + w_e z(e)).

    Reads reward_components [B,2], correctness in {0,1} and efficiency in [-1,1] (named "correct" and "efficiency" where
    the batch names its components; reward=lead makes them), rewards [B] (NaN = unscorable), group [B], response_mask
    [B,T]. Returns advantages [B,T], 0 where masked and for unscorable rows, which enter no statistic; lead_target
    (d normalised, of this batch) and lead_weights (w_c, w_e), pairs of numbers. State: W, updated by every call.
    """

    paper = "LEAD: Length-Efficient Adaptive and Dynamic Reasoning for Large Language Models, arXiv 2605.09806"
    requires = frozenset({"reward_components"})
    credits = "reward_components"
    scope = "batch"

    potential_exponent: float = param(1.0, ge=0, doc="how much the room left counts; code's potential_alpha")
    decay: float = param(0.95, ge=0, lt=1, doc="weight of the old W; code's ema")
    min_correct_weight: float = param(0.3, ge=0, le=1, doc="floor of w_c; code's w_min")
    static_correct_weight: float | None = param(None, ge=0, le=1, doc="a fixed w_c in place of all this; ablation")
    whiten: bool = param(True, doc="whiten the mix over the batch's tokens; code")
    eps: float = param(1e-8, gt=0, doc="in the denominators of CV, share and target; code")

    weights: list = state(factory=lambda: [0.5, 0.5])

    def __call__(self, batch: RolloutBatch) -> Columns:
        correct, efficiency = self._components(batch)
        groups = batch.groups
        target = self._target(groups, correct, efficiency)
        w_correct, w_efficiency = self._mixed(target)
        advantages = w_correct * zscore(groups, correct, GROUP_EPS) + w_efficiency * zscore(
            groups, efficiency, GROUP_EPS
        )
        if self.whiten:
            scorable = counted(correct) | counted(efficiency)
            advantages = whitened(advantages, masked(batch.lengths, scorable), SPREAD_EPS, count_eps=0.0)
        return {
            "advantages": batch.spread(advantages),
            "lead_target": target,
            "lead_weights": (w_correct, w_efficiency),
        }

    def _components(self, batch: RolloutBatch) -> tuple[Tensor, Tensor]:
        components = scorable_components(batch)
        names = tuple(batch.component_names) if batch.has("component_names") else COMPONENTS
        if not set(COMPONENTS) <= set(names) or components.shape[1] != len(names):
            raise DataError(
                f"advantage lead reads the reward components {COMPONENTS}; the batch has {components.shape[1]}, named"
                f" {names} (reward=lead makes them)"
            )
        correct, efficiency = (components[:, names.index(name)] for name in COMPONENTS)
        return correct, efficiency

    def _target(self, groups: Segments, correct: Tensor, efficiency: Tensor) -> tuple[float, float]:
        """Each component's share in this batch, scaled by the room it has left; both 0 when neither has any."""
        mean_c, sd_c = _total_mean_std(groups, correct)
        mean_e, sd_e = _total_mean_std(groups, efficiency, where=correct > 0.5)
        cv_c, cv_e = sd_c / (abs(mean_c) + self.eps), sd_e / (abs(mean_e) + self.eps)
        room_c = 1 - min(max(mean_c, 0.0), 1.0)
        room_e = 1 - (min(max(mean_e, -1.0), 1.0) + 1) / 2
        d_c = cv_c / (cv_c + cv_e + self.eps) * room_c**self.potential_exponent
        d_e = cv_e / (cv_c + cv_e + self.eps) * room_e**self.potential_exponent
        return d_c / (d_c + d_e + self.eps), d_e / (d_c + d_e + self.eps)

    def _mixed(self, target: tuple[float, float]) -> tuple[float, float]:
        """Move W towards the target and return the weights to apply."""
        if self.static_correct_weight is not None:
            self.weights = [self.static_correct_weight, 1 - self.static_correct_weight]
            return self.static_correct_weight, 1 - self.static_correct_weight
        self.weights = [self.decay * w + (1 - self.decay) * t for w, t in zip(self.weights, target, strict=True)]
        w_correct = max(self.weights[0], self.min_correct_weight)
        return w_correct, 1 - w_correct


def _total_mean_std(groups: Segments, x: Tensor, where: Tensor | None = None) -> tuple[float, float]:
    """Mean of the group means, and sqrt(mean variance within groups + variance between their means); 0, 0 if empty."""
    mean, std, n = groups.mean_std(x.double(), where, ddof=0)
    mean, std = mean[n > 0], std[n > 0]
    if not len(mean):
        return 0.0, 0.0
    variance = std.square().mean() + mean.var(correction=0) + SPREAD_EPS
    return float(mean.mean()), float(variance.sqrt())
