"""From finished runs to the numbers of a comparison: scores, paired differences, budgets, matching."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..core.errors import ConfigError, close_matches
from .protocol import Budget, Difference, Match, Spent, match, spent, unequal
from .runs import Run
from .statistics import Paired, common_seeds, detectable_effect, holm, paired, seeds_for_effect, spearman

SUMMARY = {"accuracy": "accuracy_after", "reward": "reward_last"}
"""Metrics that are read from a run's summary: held-out accuracy at its end, mean reward of its last steps."""

COSTS = ("generated_tokens", "update_tokens", "seconds")
"""Running totals of the metrics file: the last value counts."""

WINDOW = 10
"""Any other metric is its mean over this many last records."""

SECONDARY = ("accuracy", "reward", "completion_length", *COSTS)
"""Metrics that are reported beside the first one, where the runs have them."""

VERDICTS = {True: ("better", "worse"), False: ("worse", "better"), None: ("higher", "lower")}
"""Is more of the metric better? -> what a difference above 0 and one below 0 is called."""

POWER = 0.8
"""Power for which seeds are planned."""


def score(run: Run, metric: str) -> float | None:
    """A run's score; None while it has none."""
    if run.summary is None:
        return None
    if metric in SUMMARY:
        value = run.summary.get(SUMMARY[metric])
    else:
        values = [r[metric] for r in run.records if isinstance(r.get(metric), (int, float))]
        if not values:
            return None
        last = values[-1:] if metric in COSTS else values[-WINDOW:]
        value = math.fsum(last) / len(last)
    return float(value) if isinstance(value, (int, float)) and math.isfinite(value) else None


@dataclass(frozen=True)
class Outcome:
    """An arm against the baseline.

    holm         the p-value of `paired`, corrected over the arms
    verdict      better | worse (higher | lower for a metric without a known direction) | unresolved, by the corrected
                 p-value; too_few | no_pairs
    detectable   the smallest true difference that as many seeds find with power 0.8 (level corrected over the arms)
    needed       seeds that would find the observed difference with that power; None: more than can be planned
    needed_for   seeds that would find `--effect`
    """

    arm: str
    mean: float | None
    paired: Paired
    holm: float | None
    verdict: str
    detectable: float | None
    needed: int | None
    needed_for: int | None


@dataclass(frozen=True)
class Dropped:
    """A seed that is left out for all arms, and why."""

    seed: int
    why: str


@dataclass
class Results:
    """All numbers of a comparison.

    scores    metric -> arm -> seed -> score, every finished run
    seeds     those that count: every arm that has any run at all has a matched, finished one
    absent    arms without a single usable run, with the reason
    outcomes  of the first metric
    others    metric -> arm -> paired differences, not corrected: description, no test
    """

    baseline: str
    arms: list[str]
    metrics: list[str]
    level: float
    effect: float | None
    budget: Budget
    planned: list[int]
    seeds: list[int]
    dropped: list[Dropped]
    absent: dict[str, str]
    scores: dict[str, dict[str, dict[int, float | None]]]
    outcomes: list[Outcome]
    others: dict[str, dict[str, Paired]]
    means: dict[str, dict[str, float | None]]
    agreement: dict[str, float | None]
    spent: dict[str, Spent]
    unequal: dict[str, dict[str, float]]
    matches: list[Match]
    differences: list[Difference] = field(default_factory=list)

    @property
    def metric(self) -> str:
        return self.metrics[0]

    @property
    def resolved(self) -> list[Outcome]:
        """The arms that can be told from the baseline."""
        return [o for o in self.outcomes if o.verdict not in ("unresolved", "too_few", "no_pairs")]


def choose_metrics(runs: Mapping[str, Sequence[Run]], wanted: Sequence[str], *, same_rewards: bool = True) -> list[str]:
    """The wanted metrics, or accuracy (reward where no task measures it), then those of SECONDARY that runs have.

    same_rewards  whether all arms have the same rewards and weights; without that, `reward` is not compared
    Raises ConfigError for a wanted metric that no finished run has, and where no metric is left.
    """
    finished = [run for of_arm in runs.values() for run in of_arm if run.summary is not None]

    def known(metric: str) -> bool:
        return any(score(run, metric) is not None for run in finished)

    for metric in wanted:
        if finished and not known(metric):
            have = {*SUMMARY, *COSTS, *(k for run in finished for r in run.records[-1:] for k in r)}
            raise ConfigError(f"--metric: no finished run has {metric!r}{close_matches(metric, have)}")
    first = list(wanted) or ["accuracy" if known("accuracy") or not finished else "reward"]
    if "reward" in first and not same_rewards:
        raise ConfigError("--metric: the arms have other rewards or weights, so their rewards are not comparable")
    others = [m for m in SECONDARY if m != "reward" or same_rewards]
    return first + [m for m in others if m not in first and known(m)]


@dataclass(frozen=True)
class Counted:
    """The seeds that count, those that are dropped, arms without any score, and how pairs matched."""

    seeds: list[int]
    dropped: list[Dropped]
    absent: dict[str, str]
    matches: list[Match]


def count_seeds(
    runs: Mapping[str, Sequence[Run]],
    scores: Mapping[str, Mapping[int, float | None]],
    baseline: str,
    planned: Sequence[int],
) -> Counted:
    """The seeds for which every arm that has a score at all has one, from runs that match the baseline's."""
    by_seed = {arm: {r.seed: r for r in of_arm} for arm, of_arm in runs.items()}
    usable = {arm: common_seeds(scores[arm]) for arm in runs}
    matches = [
        match(arm, run, by_seed[baseline][run.seed])
        for arm, of_arm in runs.items()
        if arm != baseline
        for run in of_arm
        if run.seed in usable[arm] and run.seed in usable[baseline]
    ]
    absent = {arm: _why_absent(of_arm) for arm, of_arm in runs.items() if not usable[arm]}
    present = [arm for arm in runs if arm not in absent]
    dropped = [
        Dropped(seed, why)
        for seed in sorted({*planned, *(s for arm in present for s in by_seed[arm])})
        if (why := _why_dropped(seed, present, by_seed, usable, matches))
    ]
    out = {d.seed for d in dropped}
    seeds = [s for s in common_seeds(*(scores[arm] for arm in present)) if s not in out]
    return Counted(seeds, dropped, absent, matches)


def analyse(
    runs: Mapping[str, Sequence[Run]],
    baseline: str,
    *,
    planned: Sequence[int],
    metrics: Sequence[str] = (),
    budget: Budget | None = None,
    level: float = 0.95,
    effect: float | None = None,
    differences: Sequence[Difference] = (),
) -> Results:
    """Compare every arm with the baseline over the seeds that all arms have.

    runs     arm -> its runs, unfinished and failed ones included
    planned  seeds that were to be run
    effect   a difference of the first metric, for the planning of seeds
    """
    same_rewards = not any(d.setting in ("rewards", "weights") for d in differences)
    chosen = choose_metrics(runs, metrics, same_rewards=same_rewards)
    scores = {m: {arm: {r.seed: score(r, m) for r in of_arm} for arm, of_arm in runs.items()} for m in chosen}
    counted = count_seeds(runs, scores[chosen[0]], baseline, planned)
    seeds = counted.seeds

    def kept(metric: str, arm: str) -> dict[int, float | None]:
        return {seed: value for seed, value in scores[metric][arm].items() if seed in seeds}

    treatments = [arm for arm in runs if arm != baseline]
    pairs = [paired(kept(chosen[0], baseline), kept(chosen[0], arm), level=level) for arm in treatments]
    corrected = holm([pair.p for pair in pairs])
    family = max(1, sum(pair.p is not None for pair in pairs))
    outcomes = [
        _outcome(arm, pair, p, chosen[0], _mean(kept(chosen[0], arm)), level, family, effect)
        for arm, pair, p in zip(treatments, pairs, corrected, strict=True)
    ]
    present = [arm for arm in runs if arm not in counted.absent]
    budgets = {arm: spent([run for run in runs[arm] if run.seed in seeds]) for arm in present}
    return Results(
        baseline=baseline,
        arms=list(runs),
        metrics=chosen,
        level=level,
        effect=effect,
        budget=budget or Budget(),
        planned=list(planned),
        seeds=seeds,
        dropped=counted.dropped,
        absent=counted.absent,
        scores=scores,
        outcomes=outcomes,
        others={
            m: {arm: paired(kept(m, baseline), kept(m, arm), level=level) for arm in treatments} for m in chosen[1:]
        },
        means={m: {arm: _mean(kept(m, arm)) for arm in runs} for m in chosen},
        agreement={m: _agreement(scores, chosen[0], m, present, seeds) for m in chosen[1:] if m in SUMMARY},
        spent=budgets,
        unequal={
            arm: ratios
            for arm in present
            if baseline in budgets and (ratios := unequal(budgets[arm], budgets[baseline]))
        },
        matches=[m for m in counted.matches if m.seed in seeds or m.broken],
        differences=list(differences),
    )


def _outcome(
    arm: str,
    pair: Paired,
    p: float | None,
    metric: str,
    mean: float | None,
    level: float,
    family: int,
    effect: float | None,
) -> Outcome:
    if p is None or pair.sd is None or pair.mean is None:
        return Outcome(arm, mean, pair, None, pair.verdict, None, None, None)
    alpha = (1 - level) / family
    up, down = VERDICTS[higher_is_better(metric)]
    return Outcome(
        arm,
        mean,
        pair,
        holm=p,
        verdict=(up if pair.mean > 0 else down) if p <= 1 - level else "unresolved",
        detectable=detectable_effect(pair.n, pair.sd, alpha=alpha, wanted=POWER),
        needed=seeds_for_effect(pair.mean, pair.sd, alpha=alpha, wanted=POWER),
        needed_for=None if effect is None else seeds_for_effect(effect, pair.sd, alpha=alpha, wanted=POWER),
    )


def _why_absent(of_arm: Sequence[Run]) -> str:
    failures = [run for run in of_arm if run.failure is not None]
    if failures:
        return f"none of its {len(of_arm)} runs ended with a score; seed {failures[0].seed}: {failures[0].failure}"
    return f"none of its {len(of_arm)} runs ended with a score" if of_arm else "it has no run"


def _why_dropped(
    seed: int,
    present: Sequence[str],
    by_seed: Mapping[str, Mapping[int, Run]],
    usable: Mapping[str, Sequence[int]],
    matches: Sequence[Match],
) -> str:
    """Why a seed can't be compared; empty if it can."""
    reasons = []
    for arm in present:
        run = by_seed[arm].get(seed)
        if seed in usable[arm]:
            reasons += [f"{arm}: {m.why}" for m in matches if (m.arm, m.seed) == (arm, seed) and m.broken]
        elif run is None:
            reasons.append(f"{arm}: no run")
        elif run.failure is not None:
            reasons.append(f"{arm}: crashed, {run.failure}")
        else:
            reasons.append(f"{arm}: " + ("not finished" if run.summary is None else "no finite score"))
    return "; ".join(reasons)


def _mean(scores: Mapping[int, float | None]) -> float | None:
    known = [s for s in scores.values() if s is not None]
    return math.fsum(known) / len(known) if known else None


def _agreement(
    scores: Mapping[str, Mapping[str, Mapping[int, float | None]]],
    first: str,
    other: str,
    arms: Sequence[str],
    seeds: Sequence[int],
) -> float | None:
    """Rank correlation of two metrics over all runs that count."""
    both = [(scores[first][arm].get(s), scores[other][arm].get(s)) for arm in arms for s in seeds]
    known = [(a, b) for a, b in both if a is not None and b is not None]
    return spearman([a for a, _ in known], [b for _, b in known])


def higher_is_better(metric: str) -> bool | None:
    """Whether more of a metric is better; None where that is not known."""
    if metric in SUMMARY:
        return True
    return False if metric in COSTS else None


def as_json(results: Results) -> dict[str, Any]:
    """The numbers as JSON; seeds become texts."""
    import dataclasses

    return dataclasses.asdict(results) | {"budget": str(results.budget)}
