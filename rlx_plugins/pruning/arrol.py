"""ARRoL: a learned head looks at running rollouts once and continues a balanced half of each group."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..core.context import Context
from ..core.kinds import Pruner
from ..core.operations import Forward, Steps
from ..core.params import param
from ..core.registry import register
from ..core.state import state
from ..core.trajectory import Group, Rollout


@dataclass
class Choice:
    """What was decided about the running rollouts of one group.

    p_hat, keep_prob, keep   one per running rollout: calibrated success probability, chance to survive, survival
    kept_total               K, rollouts the wave is to keep; running_slots R, those left for running ones
    rho_running              rho', the share of correct ones wanted among the running survivors; None: no choice to make
    """

    p_hat: list[float]
    keep_prob: list[float]
    keep: list[bool]
    kept_total: int
    running_slots: int
    rho_running: float | None


@register("pruner", "arrol")
@dataclass
class Arrol(Pruner):
    """At a fixed length, a small head on the hidden state predicts each running rollout's success; of every wave only
    the share kappa goes on, drawn so that about the share rho of the survivors is correct, where reward varies most.

    K = min(n, max(round(kappa n), min_keep)); finished rollouts stay; R = max(K - F, 0) running ones survive:
    rho' = clip((rho K - F_correct) / R, 0, 1); w = p rho'/mean(p) + (1 - p) (1 - rho')/(1 - mean(p));
    inclusion probabilities s = min(1, c w) with sum R, by systematic sampling. p is the head's score, calibrated by
    decayed counts of outcomes per score bin. The head and the counts learn from the survivors, weighted by 1/s.

    A wave is the rollouts of a group launched together. Survivors' `propensity` is multiplied by s;
    `extras["arrol_score"]` is the head's score in (0, 1) (for weighted votes). A reward above `success_threshold` is a
    success. A score of NaN counts as the mean of p in the rest of the wave, where that of finished rollouts is 0 or 1.
    """

    paper = "Accelerating RLVR via Online Rollout Pruning, arXiv 2603.24840"
    capabilities = frozenset({"pause", "continue", "forward:hidden"})

    length: int = param(512, ge=1, doc="response tokens at which rollouts are looked at; paper's L_detect")
    kappa: float = param(0.5, gt=0, le=1, doc="share of a wave that is kept; paper")
    rho: float = param(0.5, ge=0, le=1, doc="share of correct ones wanted among the kept; paper")
    min_keep: int = param(2, ge=1, doc="rollouts a wave keeps at least; reconstructed")
    bins: int = param(10, ge=1, doc="score bins of the calibration; reconstructed")
    decay: float = param(0.9, ge=0, le=1, doc="weight of the old counts per step; reconstructed")
    warmup: int = param(10, ge=0, doc="first steps without pruning, in which the head learns; reconstructed")
    width: int = param(256, ge=1, doc="hidden units of the head; reconstructed")
    learning_rate: float = param(1e-4, gt=0, doc="of the head's Adam; reconstructed")
    head_steps: int = param(1, ge=1, doc="gradient steps of the head per training step; reconstructed")
    success_threshold: float = param(0.5, doc="a rollout succeeded if its reward is above it")
    positive: list = state(factory=list)
    negative: list = state(factory=list)
    head: dict = state(factory=dict)
    optimizer: dict = state(factory=dict)

    def pause(self, ctx: Context) -> int:
        return self.length

    def look(self, groups: list[Group], ctx: Context) -> Steps:
        waves = [(g, running) for g in groups if (running := self._running(g))]
        if not waves:
            return
        hidden = yield Forward([r for _, running in waves for r in running], "hidden")
        looks = iter(zip(self._scores(hidden, ctx), hidden))
        pruned = ctx.metrics.get("pruner/arrol_pruned", 0)
        for g, running in waves:
            pruned += self._prune(g, running, [next(looks) for _ in running], ctx)
        ctx.log("pruner/arrol_pruned", pruned)

    def _prune(self, group: Group, running: list[Rollout], looks: list[tuple[float, Any]], ctx: Context) -> int:
        """Carry out the choice for a wave; returns how many were pruned. `looks`: score and hidden state of each."""
        wave = group.wave()
        finished = [r for r in wave if r.state == "finished"]
        correct = sum(self._success(r) for r in finished)
        u = ctx.uniform("arrol/keep", group.id, wave[0].wave)
        scores = [score for score, _ in looks]
        choice = self.choose(scores, len(wave), len(finished), correct, u, prune=ctx.step >= self.warmup)
        for r, (score, hidden), s, keep in zip(running, looks, choice.keep_prob, choice.keep):
            r.extras["arrol_score"] = score
            r.extras["arrol"] = {"hidden": torch.as_tensor(hidden).detach().float().cpu(), "propensity": s}
            if keep:
                r.propensity *= s
            else:
                r.state = "pruned"
        return choice.keep.count(False)

    def choose(
        self, scores: Sequence[float], members: int, finished: int, correct: float, u: float, prune: bool = True
    ) -> Choice:
        """Which running rollouts of a wave go on.

        scores    of the running rollouts, in (0, 1) or NaN; members n of the wave; finished F, of which correct F+
        u         one uniform draw in [0, 1)
        prune     False: keep all
        """
        p_hat = self.calibrated(scores, finished, correct)
        n = len(p_hat)
        total = min(members, max(math.floor(self.kappa * members + 0.5), self.min_keep)) if prune else members
        slots = max(total - finished, 0)
        if slots >= n or slots == 0:
            every = slots >= n
            return Choice(p_hat, [float(every)] * n, [every] * n, total, slots, None)
        rho = min(max((self.rho * total - correct) / slots, 0.0), 1.0)
        pi = sum(p_hat) / n
        known = 0 < pi < 1  # no score, and all finished ones alike: nothing to choose by
        weights = [p * rho / pi + (1 - p) * (1 - rho) / (1 - pi) for p in p_hat] if known else [1.0] * n
        probabilities = inclusion_probabilities(weights, slots)
        order = sorted(range(n), key=lambda i: (p_hat[i], i))
        return Choice(p_hat, probabilities, systematic_sample(probabilities, order, u), total, slots, rho)

    def calibrated(self, scores: Sequence[float], finished: int = 0, correct: float = 0.0) -> list[float]:
        """Success probability of each score: (1 + n+) / (2 + n+ + n-) of its bin.

        Of NaN: the mean of the others' and of the outcomes of the wave's `finished` rollouts; 1/2 without any.
        """
        positive, negative = self._counts()
        known = {
            i: (1 + positive[b]) / (2 + positive[b] + negative[b])
            for i, z in enumerate(scores)
            if (b := self._bin(z)) is not None
        }
        others = len(known) + finished
        unknown = (sum(known.values()) + correct) / others if others else 0.5
        return [known.get(i, unknown) for i in range(len(scores))]

    def observe(self, groups: list[Group], ctx: Context) -> None:
        looked = [(r, look) for g in groups for r in g.rollouts if (look := r.extras.pop("arrol", None)) is not None]
        ctx.log("pruner/arrol_looked", len(looked))  # 0: all responses ended before the detection length
        positive, negative = ([self.decay * n for n in counts] for counts in self._counts())
        scored = []
        for r, look in looked:
            if r.scorable and (b := self._bin(r.extras["arrol_score"])) is not None:
                (positive if self._success(r) else negative)[b] += 1 / look["propensity"]
                scored.append((look["hidden"], self._success(r), 1 / look["propensity"]))
        self.positive, self.negative = positive, negative
        if scored:
            self._train(scored, ctx)

    # ---- the head: hidden -> width -> 1
    def _scores(self, hidden: Sequence[Any], ctx: Context) -> list[float]:
        """Score in (0, 1) of each hidden state [H]; NaN where the state is not finite."""
        x = torch.stack([torch.as_tensor(h).detach().float().cpu() for h in hidden])
        if not self.head:
            self.head = _new_head(x.shape[1], self.width, ctx.generator("arrol/head"))
        with torch.no_grad():
            return torch.sigmoid(_logit(self.head, x)).double().tolist()

    def _train(self, scored: Sequence[tuple[Tensor, bool, float]], ctx: Context) -> None:
        """Gradient steps on the propensity-weighted cross-entropy between score and outcome."""
        x = torch.stack([h for h, _, _ in scored])
        y = torch.tensor([float(success) for _, success, _ in scored])
        weight = torch.tensor([w for _, _, w in scored])
        weight = weight / weight.sum()
        head = {name: value.clone().requires_grad_() for name, value in self.head.items()}
        optimizer = torch.optim.Adam(head.values(), lr=self.learning_rate)
        if self.optimizer:
            optimizer.load_state_dict(self.optimizer)
        with torch.enable_grad():
            for _ in range(self.head_steps):
                optimizer.zero_grad()
                loss = torch.nn.functional.binary_cross_entropy_with_logits(_logit(head, x), y, weight, reduction="sum")
                loss.backward()
                optimizer.step()
        self.head = {name: value.detach() for name, value in head.items()}
        self.optimizer = optimizer.state_dict()
        ctx.log("pruner/arrol_head_loss", float(loss.detach()))

    # ---- helpers
    def _running(self, group: Group) -> list[Rollout]:
        """The rollouts of the group's last wave that stand at the detection length for the first time."""
        return [
            r for r in group.wave() if r.state == "paused" and r.pause_at == self.length and "arrol" not in r.extras
        ]

    def _success(self, r: Rollout) -> bool:
        return r.reward is not None and r.reward > self.success_threshold

    def _counts(self) -> tuple[list[float], list[float]]:
        return self.positive or [0.0] * self.bins, self.negative or [0.0] * self.bins

    def _bin(self, score: float) -> int | None:
        return None if math.isnan(score) else min(math.floor(self.bins * score), self.bins - 1)


def inclusion_probabilities(weights: Sequence[float], slots: int) -> list[float]:
    """min(1, c * weight) with c such that the sum is `slots`; `slots` is below the number of weights."""
    certain: set[int] = set()
    while True:
        free = sum(w for i, w in enumerate(weights) if i not in certain)
        c = (slots - len(certain)) / free if free > 0 else 0.0
        over = {i for i, w in enumerate(weights) if i not in certain and c * w > 1}
        if not over:
            return [1.0 if i in certain else c * w for i, w in enumerate(weights)]
        certain |= over


def systematic_sample(probabilities: Sequence[float], order: Sequence[int], u: float) -> list[bool]:
    """Keep entry j iff one of u, u + 1, u + 2, ... falls in its stretch of the running sum taken in `order`.

    Entry j is kept with its probability over uniform u, and their number is the sum of the probabilities. Sums are
    rounded to 12 decimals before the comparison.
    """
    keep = [False] * len(probabilities)
    upto = 0.0
    for j in order:
        start, upto = upto, upto + probabilities[j]
        first, last = round(start, 12), round(upto, 12)
        keep[j] = u + max(math.ceil(first - u), 0) < last
    return keep


def _new_head(inputs: int, width: int, generator: torch.Generator) -> dict[str, Tensor]:
    """Weights of a two-layer perceptron, uniform within 1/sqrt(fan in)."""

    def uniform(*shape: int, fan_in: int) -> Tensor:
        return (2 * torch.rand(*shape, generator=generator) - 1) / math.sqrt(fan_in)

    return {
        "w1": uniform(width, inputs, fan_in=inputs),
        "b1": uniform(width, fan_in=inputs),
        "w2": uniform(width, fan_in=width),
        "b2": uniform(1, fan_in=width),
    }


def _logit(head: dict[str, Tensor], x: Tensor) -> Tensor:
    """[N] from hidden states [N,H]."""
    return torch.relu(x @ head["w1"].T + head["b1"]) @ head["w2"] + head["b2"]
