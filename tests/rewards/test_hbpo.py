"""HBPO's reward: what a correct answer pays by its token budget."""

import math
import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import rlx_plugins as rlx
from rlx_plugins import DataError
from rlx_plugins.testing import evaluate


def pay(correct, length, budget, **params):
    out = evaluate("reward", "hbpo", {"correct": correct, "length": length, "budget": budget}, params)
    return out["rewards"].tolist(), out["baseline"].tolist()


@settings(max_examples=60, deadline=None)
@given(st.sampled_from([0.0, 0.5, 0.7, 1.0]), st.integers(0, 120), st.integers(1, 100), st.floats(0, 0.01))
def test_the_reward_of_a_row_is_that_of_its_branch(correct, n, b, alpha):
    (reward,), (baseline,) = pay([correct], [n], [b], beta=2.0, alpha=alpha, l_max=100)
    assert baseline == pytest.approx(2 * math.cos(math.pi * b / 200), abs=1e-12)
    want = 0.0
    if correct > 0.5 and n <= 100:
        want = baseline if n <= b else 2 * math.cos(math.pi * n / 200) - alpha * (n - b)
    assert reward == pytest.approx(want, abs=1e-12)
    assert reward <= baseline + 1e-12


def test_it_is_flat_within_the_budget_and_falls_without_a_jump_beyond_it():
    rewards, _ = pay([1] * 6, [0, 10, 20, 21, 30, 40], [20] * 6, l_max=40, alpha=0.001)
    assert rewards[0] == rewards[1] == rewards[2]
    assert rewards[2] > rewards[3] > rewards[4] > rewards[5]
    assert rewards[2] - rewards[3] < 0.04


def test_smaller_budgets_pay_more():
    rewards, baselines = pay([1, 1, 1], [1, 1, 1], [10, 20, 40], l_max=40)
    assert rewards == baselines and rewards[0] > rewards[1] > rewards[2] == pytest.approx(0, abs=1e-12)


def test_a_row_that_was_not_judged_or_has_no_budget_is_unscorable():
    rewards, _ = pay([None, 1, 1], [1, 1, 1], [10, None, 10], l_max=40)
    assert [math.isnan(r) for r in rewards] == [True, True, False]


def test_a_budget_beyond_the_longest_response_is_refused():
    with pytest.raises(DataError, match="row 1: budget 50 exceeds reward hbpo.max_length 40"):
        pay([1, 1], [1, 1], [40, 50], l_max=40)


def test_a_cost_that_makes_a_long_correct_answer_worse_than_a_wrong_one_is_warned_of():
    with pytest.warns(UserWarning, match="paid less than a wrong one"):
        rewards, _ = pay([1], [40], [10], l_max=40, alpha=0.1)
    assert rewards[0] == pytest.approx(-3.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert pay([1], [40], [10], l_max=40, alpha=0.03)[0] == pytest.approx([-0.9])


def test_half_precision_rewards_do_not_swallow_the_cost_of_a_token():
    batch = rlx.RolloutBatch(
        {
            "rewards": torch.ones(2, dtype=torch.bfloat16),
            "group": torch.tensor([0, 0]),
            "budget": torch.tensor([10, 10]),
            "response_mask": torch.arange(12) < torch.tensor([[11], [12]]),
        }
    )
    rewards = rlx.create("reward", "hbpo", max_length=2000)(batch)["rewards"]
    assert rewards.dtype == torch.float32 and float(rewards[0] - rewards[1]) == pytest.approx(1.07e-4, abs=5e-6)
