"""The rules from metrics to pathologies and kinds."""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlx_plugins.core.kinds import KINDS
from rlx_plugins.core.registry import names
from rlx_plugins.diagnosis.rules import RULES, STAGES, diagnose, stages

METRICS = st.dictionaries(
    st.sampled_from([rule.metric for rule in RULES]), st.one_of(st.none(), st.floats(-5, 5)), max_size=len(RULES)
)


def ids(flags):
    return [flag.rule.id for flag in flags]


def test_the_worked_example():
    metrics = {"frac_all_fail": 0.4, "entropy_ratio": 0.25, "clip_frac": 0.05, "rollout_time_frac": 0.77}
    got = diagnose({**metrics, "audit_corr": 0.2})
    assert ids(got.flags) == ["all_fail", "entropy_collapse", "rollout_bound"]
    assert [f.severity for f in got.flags] == pytest.approx([0.333333, 0.166667, 0.1], abs=1e-6)
    assert len(got.unknown) == 10
    assert got.try_kinds == ("allocator", "hint", "pruner", "clip", "drafter", "sampler", "advantage", "replay")


def test_nothing_measured_is_nothing_found_and_everything_unknown():
    got = diagnose({})
    assert (got.flags, got.try_kinds, list(got.unknown)) == ((), (), [rule.id for rule in RULES])


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.id)
def test_a_value_at_the_threshold_fires_and_one_on_its_good_side_does_not(rule):
    good = rule.threshold - 0.01 if rule.above else rule.threshold + 0.01
    assert ids(diagnose({rule.metric: rule.threshold}).flags) == [rule.id]
    assert diagnose({rule.metric: good}).flags == ()
    assert rule.id not in diagnose({rule.metric: good}).unknown


def test_the_severity_at_a_threshold_of_zero_is_the_value():
    [flag] = diagnose({"audit_corr": -0.3}).flags
    assert flag.severity == pytest.approx(0.3)


def test_values_that_are_not_finite_are_unknown():
    for value in (None, math.nan, math.inf):
        assert "truncation" in diagnose({"frac_truncated": value}).unknown


def test_thresholds_can_be_replaced_and_unknown_rules_are_ignored():
    assert diagnose({"clip_frac": 0.1}).flags == ()
    [flag] = diagnose({"clip_frac": 0.1}, {"over_clipping": 0.05, "nothing": 1.0}).flags
    assert (flag.threshold, flag.severity) == (0.05, pytest.approx(1.0))


@given(METRICS, st.floats(0, 3))
def test_making_a_metric_worse_never_removes_its_flag(metrics, by):
    before = diagnose(metrics)
    for flag in before.flags:
        worse = flag.value + by if flag.rule.above else flag.value - by
        assert flag.rule.id in ids(diagnose({**metrics, flag.rule.metric: worse}).flags)


@given(METRICS, st.randoms())
def test_the_order_of_the_metrics_does_not_matter(metrics, rng: random.Random):
    shuffled = list(metrics.items())
    rng.shuffle(shuffled)
    assert diagnose(dict(shuffled)) == diagnose(metrics)


@given(METRICS)
def test_flags_and_unknown_are_disjoint(metrics):
    got = diagnose(metrics)
    assert not set(ids(got.flags)) & set(got.unknown)


def test_every_kind_has_one_stage():
    assert set(STAGES) == (set(KINDS) - {"method"}) | {"system"}
    assert stages(["hint", "reward", "sampler", "replay", "clip", "system", "nothing"]) == [*"GFCROX", None]


def test_every_method_that_is_named_exists_and_is_of_a_kind_of_its_rule():
    for rule in RULES:
        assert set(rule.kinds) <= set(STAGES)
        for method in rule.methods:
            kind, name = method.split("=")
            assert kind in rule.kinds, (rule.id, method)
            assert name in names(kind), (rule.id, method)
