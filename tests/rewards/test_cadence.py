"""CADENCE's reward: partial credit for near misses."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlx_plugins import ConfigError
from rlx_plugins.testing import evaluate


def credit(correct, predicted, target, **params):
    out = evaluate("reward", "cadence", {"correct": correct, "predicted": predicted, "target": target}, params)
    return out["reward"].tolist(), float(out["nonzero_fraction"])


NUMBER = st.one_of(st.floats(-100, 100), st.sampled_from([0.0, math.nan, math.inf, -math.inf, 1e308, -1e308]))


@settings(max_examples=80, deadline=None)
@given(st.booleans(), NUMBER, NUMBER, st.sampled_from([0.1, 0.5, 2.0]), st.sampled_from([0.5, 1.0]))
def test_a_wrong_number_earns_less_the_further_it_is_off(correct, predicted, target, rel_tol, floor):
    (reward,), share = credit([correct], [predicted], [target], rel_tol=rel_tol, floor=floor, r_max=0.4)
    want = 1.0
    if not correct:
        known = math.isfinite(predicted) and math.isfinite(target)
        error = abs(predicted - target) / max(abs(target), floor) if known else math.inf
        want = 0.4 * max(0.0, 1 - error / rel_tol)
    assert reward == pytest.approx(want, abs=1e-12)
    assert share == (want > 0)


def test_an_equal_number_the_verifier_rejected_gets_the_partial_reward_only():
    assert credit([0, 1], [7.0, None], [7.0, 7.0])[0] == [0.5, 1.0]


def test_the_error_is_relative_and_absolute_below_the_floor():
    assert credit([0, 0], [90.0, 9.0], [100.0, 10.0])[0] == pytest.approx([0.4, 0.4])
    assert credit([0, 0], [0.1, -0.2], [0.0, 0.1])[0] == pytest.approx([0.4, 0.2])
    assert credit([0, 0], [-9.0, 9.0], [-10.0, -10.0])[0] == pytest.approx([0.4, 0.0])


def test_a_row_that_was_not_judged_is_unscorable_and_counts_in_no_share():
    rewards, share = credit([None, 1, 0, 0], [5.0] * 4, [5.0, 5.0, 5.0, 50.0])
    assert math.isnan(rewards[0]) and rewards[1:] == [1, 0.5, 0] and share == pytest.approx(2 / 3)


def test_no_rows_give_no_rewards():
    assert credit([], [], []) == ([], 0.0)


def test_partial_credit_as_high_as_that_of_a_right_answer_is_refused():
    with pytest.raises(ConfigError, match="max_partial: must be < 1"):
        credit([1], [1.0], [1.0], r_max=1.0)


def test_the_share_of_rewards_above_nothing_is_as_exact_as_they_are():
    inputs = {"correct": [1, 0, 0, 0, 0], "predicted": [1, 9, 9, 9, 9], "target": [1, 1, 1, 1, 1]}
    assert float(evaluate("reward", "cadence", inputs)["nonzero_fraction"]) == 0.2
