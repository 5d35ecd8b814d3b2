"""What the rules look at, read from a run's metrics."""

import pytest

from rlx_plugins.diagnosis.measurements import measure


def records(n=20, **series):
    """n records; a series is a constant or a function of the record's number from 0."""
    return [{"step": i + 1} | {k: v(i) if callable(v) else v for k, v in series.items()} for i in range(n)]


def value(name, rows, plugins=True):
    return measure(rows, plugins=plugins)[name].value


def test_a_value_is_the_mean_of_the_last_tenth_with_its_steps_as_evidence():
    rows = records(20, **{"rlx/groups/all_fail": lambda i: 0.5 if i >= 18 else 0.0})
    got = measure(rows, plugins=True)["frac_all_fail"]
    assert (got.value, got.evidence) == (0.5, "rlx/groups/all_fail 0.5, steps 19-20")


def test_ratios_compare_the_end_with_the_start():
    rows = records(20, entropy=lambda i: 0.2 if i >= 18 else 0.8, completion_length=lambda i: 10 + 10 * (i >= 18))
    assert value("entropy_ratio", rows) == pytest.approx(0.25)
    assert value("length_ratio", rows) == pytest.approx(2.0)
    assert "0.8 (steps 1-2) -> 0.2 (steps 19-20)" in measure(rows, plugins=True)["entropy_ratio"].evidence


def test_a_run_of_one_record_has_no_ratio():
    got = measure(records(1, entropy=0.5), plugins=True)["entropy_ratio"]
    assert (got.value, got.evidence) == (None, "one record has no start to compare with")


def test_what_the_metrics_do_not_carry_is_not_measured_and_named():
    got = measure(records(5, reward=0.1), plugins=True)
    assert all(m.value is None for m in got.values())
    assert got["staleness_mean"].evidence == "the run's metrics have no rlx/staleness/mean"
    assert "second, independent score" in got["audit_corr"].evidence
    assert measure([], plugins=True)["domain_ratio_max"].value is None


def test_nulls_do_not_count():
    rows = records(20, **{"rlx/staleness/mean": lambda i: None if i == 19 else 3.0})
    assert value("staleness_mean", rows) == 3.0


def test_the_hosts_clip_statistics_do_not_describe_a_plug_in():
    rows = records(5, **{"clip_ratio/region_mean": 0.3})
    assert value("clip_frac", rows, plugins=True) is None
    assert value("clip_frac", rows, plugins=False) == 0.3
    assert value("clip_frac", records(5, **{"rlx/clip/clipped": 0.1}), plugins=True) == pytest.approx(0.1)


def test_the_share_of_time_is_that_between_the_records_not_of_start_up():
    rows = records(11, seconds=lambda i: 100 + 10 * i, rollout_seconds=lambda i: 2 + 8 * i)
    assert value("rollout_time_frac", rows) == pytest.approx(0.8)


def test_verls_names_are_known():
    rows = records(
        10,
        **{
            "timing_s/gen": 6.0,
            "timing_s/step": 8.0,
            "actor/entropy": 1.0,
            "response_length/clip_ratio": 0.25,
            "actor/pg_clipfrac": 0.2,
            "rollout_corr/kl": 0.03,
        },
    )
    got = measure(rows, plugins=False)
    names = ("rollout_time_frac", "entropy_ratio", "frac_truncated", "clip_frac", "rollout_train_kl")
    assert [got[n].value for n in names] == pytest.approx([0.75, 1.0, 0.25, 0.2, 0.03])


def test_the_domain_that_is_trained_most_against_its_share():
    rows = records(
        10,
        **{
            "rlx/domain_target/math": 0.2,
            "rlx/domain_share/math": 0.5,
            "rlx/domain_target/code": 0.8,
            "rlx/domain_share/code": 0.5,
        },
    )
    got = measure(rows, plugins=True)["domain_ratio_max"]
    assert got.value == pytest.approx(2.5)
    assert got.evidence.startswith("math: 0.5 of the rows, 0.2 of the data")
