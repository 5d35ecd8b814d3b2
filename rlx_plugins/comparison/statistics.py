"""Statistics of matched seeds: paired differences with a t interval, Holm's correction, power, rank agreement.

The interval is that of DataFlex-RL (arXiv 2609.06107): mean +- t_{1-(1-level')/2, n-1} sd/sqrt(n) over the differences
treatment - control of each seed, sd unbiased.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.special import nctdtr, stdtr, stdtrit

from ..core.errors import ConfigError

Scores = Mapping[Any, float | None]
"""Seed -> score; None or a number that is not finite: the run has none."""

MAX_SEEDS = 100_000
"""Planning gives up above this number of seeds."""


@dataclass(frozen=True)
class Paired:
    """Differences treatment - control over the seeds both have.

    n             pairs
    mean, sd      of the differences; sd is unbiased, None below two pairs
    lo, hi        the interval; None below two pairs
    p             two-sided t test, times `family`, at most 1
    verdict       better | worse | unresolved | too_few (one pair) | no_pairs
    wins, losses  pairs with a difference above, below 0
    dropped       seeds that one side lacks
    seeds_needed  seeds at which the interval's half-width reaches `precision`, if that was given
    """

    n: int
    mean: float | None
    sd: float | None
    lo: float | None
    hi: float | None
    p: float | None
    verdict: str
    wins: int
    losses: int
    dropped: tuple[Any, ...]
    seeds_needed: int | None


def paired(
    control: Scores, treatment: Scores, *, level: float = 0.95, family: int = 1, precision: float | None = None
) -> Paired:
    """Compare two arms seed by seed.

    level      coverage of the interval
    family     simultaneous comparisons; the level becomes 1 - (1 - level)/family (Bonferroni)
    precision  wanted half-width of the interval, for `seeds_needed`
    """
    if not 0 < level < 1:
        raise ConfigError(f"level: must be between 0 and 1, got {level}")
    if family < 1:
        raise ConfigError(f"family: must be >= 1 comparison, got {family}")
    if precision is not None and not precision > 0:
        raise ConfigError(f"precision: must be above 0, got {precision}")
    used = common_seeds(control, treatment)
    dropped = tuple(s for s in _sorted({*control, *treatment}) if s not in used)
    d = np.array([float(treatment[s]) - float(control[s]) for s in used])  # type: ignore[arg-type]
    n, wins, losses = len(d), int((d > 0).sum()), int((d < 0).sum())
    if n < 2:
        mean = float(d[0]) if n else None
        return Paired(n, mean, None, None, None, None, "too_few" if n else "no_pairs", wins, losses, dropped, None)
    mean, sd, alpha = float(d.mean()), float(d.std(ddof=1)), (1 - level) / family
    half = _t(alpha, n) * sd / math.sqrt(n)
    lo, hi = mean - half, mean + half
    verdict = "better" if lo > 0 else "worse" if hi < 0 else "unresolved"
    needed = None if precision is None else _smallest(lambda m: _t(alpha, m) * sd / math.sqrt(m) <= precision)
    p = min(1.0, _p_value(mean, sd, n) * family)
    return Paired(n, mean, sd, lo, hi, p, verdict, wins, losses, dropped, needed)


def common_seeds(*arms: Scores) -> list[Any]:
    """Seeds for which every arm has a finite score, in order."""
    have = [{s for s, score in arm.items() if score is not None and math.isfinite(score)} for arm in arms]
    return _sorted(set.intersection(*have)) if have else []


def holm(p_values: Sequence[float | None]) -> list[float | None]:
    """Holm's step-down adjusted p-values; None stays None and does not count.

    The k-th smallest of m is max over j <= k of min(1, (m - j + 1) p_(j)).
    """
    known = sorted((p, i) for i, p in enumerate(p_values) if p is not None)
    adjusted: list[float | None] = [None] * len(p_values)
    largest = 0.0
    for k, (p, i) in enumerate(known):
        largest = max(largest, min(1.0, (len(known) - k) * p))
        adjusted[i] = largest
    return adjusted


def power(n: int, effect: float, sd: float, alpha: float = 0.05) -> float:
    """Power of the two-sided paired t test: P(|T| > t_{1-alpha/2, n-1}), T noncentral by effect/sd sqrt(n)."""
    if sd == 0:
        return 1.0 if effect != 0 else alpha
    t, shift = _t(alpha, n), abs(effect) / sd * math.sqrt(n)
    upper = 1 - float(nctdtr(n - 1, shift, t))
    return min(1.0, upper + float(nctdtr(n - 1, shift, -t)))


def seeds_for_effect(effect: float, sd: float, *, alpha: float = 0.05, wanted: float = 0.8) -> int | None:
    """Smallest number of seeds whose paired t test finds a difference of `effect` with probability `wanted`.

    None: more than MAX_SEEDS, or no effect at all.
    """
    return None if effect == 0 else _smallest(lambda n: power(n, effect, sd, alpha) >= wanted)


def detectable_effect(n: int, sd: float, *, alpha: float = 0.05, wanted: float = 0.8) -> float:
    """Smallest true difference that `n` seeds find with probability `wanted`, given the sd of the differences."""
    if sd == 0:
        return 0.0
    low, high = 0.0, sd
    while power(n, high, sd, alpha) < wanted:
        low, high = high, 2 * high
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if power(n, middle, sd, alpha) < wanted else (low, middle)
    return high


def spearman(a: Sequence[float], b: Sequence[float]) -> float | None:
    """Rank correlation with average ranks for ties; None if a side is constant or shorter than two."""
    if len(a) != len(b):
        raise ConfigError(f"spearman: two lists of one length are wanted, got {len(a)} and {len(b)}")
    if len(a) < 2:
        return None
    x, y = _ranks(a), _ranks(b)
    x, y = x - x.mean(), y - y.mean()
    norm = math.sqrt(float((x * x).sum() * (y * y).sum()))
    return float((x * y).sum()) / norm if norm else None


@dataclass(frozen=True)
class Balanced:
    """A domain-balanced score: `score` is None while a benchmark in `missing` has no finite value."""

    score: float | None
    domain: dict[str, float | None]
    missing: tuple[str, ...]


def domain_balanced(bench: Mapping[str, float | None], domains: Mapping[str, Sequence[str]]) -> Balanced:
    """Mean over domains of the mean over a domain's benchmarks; never over fewer than all of them."""
    missing: list[str] = []
    means: dict[str, float | None] = {}
    for domain, names in domains.items():
        scores = [bench.get(name) for name in names]
        absent = [n for n, s in zip(names, scores, strict=True) if s is None or not math.isfinite(s)]
        missing += [name for name in absent if name not in missing]
        means[domain] = None if absent or not names else math.fsum(scores) / len(scores)  # type: ignore[arg-type]
    whole = means and all(m is not None for m in means.values())
    score = math.fsum(means.values()) / len(means) if whole else None  # type: ignore[arg-type]
    return Balanced(score, means, tuple(missing))


def _t(alpha: float, n: int) -> float:
    """Two-sided quantile of Student's t for n pairs."""
    return float(stdtrit(n - 1, 1 - alpha / 2))


def _p_value(mean: float, sd: float, n: int) -> float:
    if sd == 0:
        return 0.0 if mean != 0 else 1.0
    return 2 * float(stdtr(n - 1, -abs(mean) / (sd / math.sqrt(n))))


def _smallest(holds: Any) -> int | None:
    """Smallest n >= 2 for which the monotone condition holds; None above MAX_SEEDS."""
    low, high = 1, 2
    while not holds(high):
        low, high = high, 2 * high
        if low > MAX_SEEDS:
            return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high


def _ranks(values: Sequence[float]) -> np.ndarray[Any, Any]:
    """Ranks from 1, the average of their places for equal values."""
    x = np.asarray(values, dtype=float)
    below = (x[None, :] < x[:, None]).sum(1)
    equal = (x[None, :] == x[:, None]).sum(1)
    return below + (equal + 1) / 2


def _sorted(seeds: set[Hashable]) -> list[Any]:
    """Numbers by value, then anything else by its text."""
    return sorted(seeds, key=lambda s: (0, s, "") if isinstance(s, (int, float)) else (1, 0, str(s)))
