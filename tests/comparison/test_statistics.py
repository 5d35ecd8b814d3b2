"""The statistics of matched seeds, against scipy, closed forms and published tables."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

import rlx_plugins as rlx
from rlx_plugins.comparison.statistics import (
    common_seeds,
    detectable_effect,
    domain_balanced,
    holm,
    paired,
    power,
    seeds_for_effect,
    spearman,
)

CONTROL = {0: 40.1, 1: 41.0, 2: 39.6, 3: 40.5}
TREATMENT = {0: 40.6, 1: 40.8, 2: 40.3, 3: 41.1}
SCORES = st.lists(st.tuples(st.floats(-100, 100), st.floats(-100, 100)), min_size=2, max_size=12)


def sides(pairs):
    return dict(enumerate(a for a, _ in pairs)), dict(enumerate(b for _, b in pairs))


def test_the_worked_example():
    got = paired(CONTROL, TREATMENT, precision=0.5)
    assert (got.n, got.wins, got.losses, got.verdict, got.seeds_needed) == (4, 3, 1, "unresolved", 6)
    assert (got.mean, got.sd, got.p) == pytest.approx((0.4, 0.408248, 0.144910), abs=1e-6)
    assert (got.lo, got.hi) == pytest.approx((-0.249614, 1.049614), abs=1e-6)


def test_the_interval_and_p_are_those_of_scipys_paired_t_test():
    rng = np.random.default_rng(7)
    a, b = rng.normal(size=9), rng.normal(0.4, 1.3, size=9)
    expected = stats.ttest_rel(b, a)
    got = paired(dict(enumerate(a)), dict(enumerate(b)), level=0.9)
    low, high = expected.confidence_interval(0.9)
    assert (got.lo, got.hi, got.p) == pytest.approx((low, high, expected.pvalue), rel=1e-12)


def test_the_quantile_for_twelve_seeds_is_the_tables():
    scores = {seed: float(seed % 2) for seed in range(12)}
    got = paired(dict.fromkeys(range(12), 0.0), scores)
    assert (got.hi - got.mean) / (got.sd / math.sqrt(12)) == pytest.approx(2.200985, abs=1e-6)


@given(SCORES)
def test_swapping_the_sides_mirrors_the_interval(pairs):
    a, b = sides(pairs)
    one, other = paired(a, b), paired(b, a)
    assert (one.lo, one.hi, one.wins) == pytest.approx((-other.hi, -other.lo, other.losses), abs=1e-9)


@given(SCORES, st.integers(-50, 50))
def test_an_effect_of_the_seed_on_both_sides_changes_nothing(pairs, shift):
    a, b = sides([(round(x, 3), round(y, 3)) for x, y in pairs])
    moved = [{s: v + shift * (s + 1) for s, v in side.items()} for side in (a, b)]
    one, other = paired(a, b), paired(*moved)
    assert (one.lo, one.hi) == pytest.approx((other.lo, other.hi), abs=1e-6)


@given(SCORES, st.integers(1, 20))
def test_a_family_widens_the_interval_and_a_family_of_one_does_not(pairs, family):
    a, b = sides(pairs)
    one, many = paired(a, b), paired(a, b, family=family)
    assert many.hi - many.lo >= one.hi - one.lo - 1e-12
    assert paired(a, b, family=1) == one
    assert one.wins + one.losses <= one.n


def test_the_interval_covers_the_truth_as_often_as_it_says():
    rng = np.random.default_rng(3)
    inside = 0
    for row in rng.normal(0.3, 1.0, size=(2000, 5)):
        got = paired(dict.fromkeys(range(5), 0.0), dict(enumerate(row)))
        inside += got.lo <= 0.3 <= got.hi
    assert inside / 2000 == pytest.approx(0.95, abs=0.015)


def test_seeds_of_one_side_and_scores_that_are_not_finite_are_dropped_and_named():
    got = paired({0: 1.0, 1: 2.0, 2: math.nan, 4: 1.0}, {0: 2.0, 1: 2.5, 2: 3.0, 3: 1.0, 4: None})
    assert (got.n, got.dropped) == (2, (2, 3, 4))


def test_one_pair_has_a_difference_but_no_interval():
    got = paired({0: 1.0}, {0: 1.5})
    assert (got.mean, got.sd, got.lo, got.hi, got.p, got.verdict) == (0.5, None, None, None, None, "too_few")


def test_no_pair_has_nothing():
    got = paired({0: 1.0}, {1: 1.5})
    assert (got.n, got.mean, got.verdict, got.dropped) == (0, None, "no_pairs", (0, 1))


def test_equal_differences_make_a_point():
    got = paired({0: 1.0, 1: 2.0}, {0: 1.5, 1: 2.5}, precision=0.1)
    assert (got.lo, got.hi, got.p, got.verdict, got.seeds_needed) == (0.5, 0.5, 0.0, "better", 2)
    same = paired({0: 1.0, 1: 2.0}, {0: 1.0, 1: 2.0})
    assert (same.lo, same.p, same.verdict, same.wins) == (0.0, 1.0, "unresolved", 0)


@pytest.mark.parametrize("wrong", [{"level": 1.0}, {"family": 0}, {"precision": 0.0}])
def test_a_bad_argument_is_refused_by_name(wrong):
    with pytest.raises(rlx.ConfigError, match=next(iter(wrong))):
        paired(CONTROL, TREATMENT, **wrong)


def test_common_seeds_are_those_every_arm_has():
    assert common_seeds({0: 1.0, 1: 2.0, 10: 3.0}, {10: 1.0, 1: None, 0: 2.0}) == [0, 10]
    assert common_seeds() == []


def test_holm_by_hand():
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.5, 0.9]) == [1.0, 1.0]
    assert holm([0.02, None, 0.02]) == [0.04, None, 0.04]
    assert holm([]) == []


@given(st.lists(st.floats(0, 1), min_size=1, max_size=8))
def test_holm_keeps_the_order_and_lies_between_p_and_bonferroni(p):
    adjusted = holm(p)
    for a, q in zip(p, adjusted):
        assert a <= q <= min(1.0, a * len(p)) + 1e-12
    order = np.argsort(p, kind="stable")
    assert all(adjusted[i] <= adjusted[j] for i, j in zip(order, order[1:]))


@pytest.mark.parametrize(("effect", "n"), [(0.5, 34), (1.0, 10), (0.2, 199)])
def test_the_seeds_for_a_standardised_effect_are_those_of_power_tables(effect, n):
    assert seeds_for_effect(effect, 1.0) == n
    assert power(n - 1, effect, 1.0) < 0.8 <= power(n, effect, 1.0)


def test_power_is_scipys_noncentral_t_and_what_a_simulation_finds():
    t = stats.t.ppf(0.995, 7)
    expected = stats.nct.sf(t, 7, 0.9 * math.sqrt(8)) + stats.nct.cdf(-t, 7, 0.9 * math.sqrt(8))
    assert power(8, 0.9, 1.0, alpha=0.01) == pytest.approx(expected, abs=1e-9)
    rng = np.random.default_rng(5)
    found = stats.ttest_1samp(rng.normal(0.9, 1.0, size=(4000, 8)), 0, axis=1).pvalue <= 0.01
    assert found.mean() == pytest.approx(expected, abs=0.025)


def test_an_effect_that_would_take_too_many_seeds_or_is_none_has_no_number():
    assert seeds_for_effect(1e-4, 1.0) is None
    assert seeds_for_effect(0.0, 1.0) is None
    assert seeds_for_effect(0.1, 0.0) == 2


def test_the_detectable_effect_has_the_power_it_was_asked_for():
    effect = detectable_effect(5, 2.0, alpha=0.0125)
    assert power(5, effect, 2.0, alpha=0.0125) == pytest.approx(0.8, abs=1e-6)
    assert detectable_effect(5, 0.0) == 0.0


def test_rank_correlation_is_scipys_with_ties():
    a, b = [1.0, 2.0, 2.0, 5.0, 3.0, 2.0], [2.0, 1.0, 4.0, 4.0, 4.0, 0.0]
    assert spearman(a, b) == pytest.approx(stats.spearmanr(a, b).statistic)
    assert spearman([1, 2, 3, 4], [4, 2, 3, 1]) == pytest.approx(-0.8)
    assert spearman([1, 1], [1, 2]) is None
    with pytest.raises(rlx.ConfigError, match="one length"):
        spearman([1], [1, 2])


def test_a_domain_balanced_score_is_never_over_fewer_benchmarks():
    domains = {"math": ["a", "b"], "logic": ["c"]}
    assert domain_balanced({"a": 60, "b": 20, "c": 30}, domains).score == 35
    got = domain_balanced({"a": 60, "b": math.nan}, domains)
    assert (got.score, got.domain, got.missing) == (None, {"math": None, "logic": None}, ("b", "c"))
