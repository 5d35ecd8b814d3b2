"""V_0.5's baseline: between prior and mean, and how far it goes."""

import math
import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlx_plugins import ConfigError, RolloutBatch, create
from rlx_plugins.testing import evaluate


def form(rewards, prior, params=None, group=None):
    n = len(rewards)
    given = {
        "rewards": rewards,
        "group": group or [0] * n,
        "value_prior": prior if isinstance(prior, list) else [prior] * n,
    }
    return evaluate("advantage", "v05", given, params)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from([-1.0, 1.0]), min_size=1, max_size=16), st.floats(-1, 1))
def test_the_baseline_lies_between_prior_and_mean_and_near_the_mean_for_many_rollouts(rewards, prior):
    out = form(rewards, prior)
    b, w, m, n = float(out["baseline"][0]), float(out["weight"][0]), sum(rewards) / len(rewards), len(rewards)
    assert 0 <= w < 1 and min(m, prior) - 1e-12 <= b <= max(m, prior) + 1e-12
    assert abs(b - m) <= 1 / math.sqrt(n) + 1e-12
    assert out["advantages"].tolist() == pytest.approx([r - b for r in rewards])


def test_a_gap_below_the_noise_trusts_the_prior_fully():
    out = form([1.0, -1.0, -1.0, -1.0], 0.0)  # gap 0.5 = 1 / sqrt(4)
    assert out["weight"].tolist() == [0] * 4 and out["baseline"].tolist() == [0] * 4


def test_the_weight_grows_with_the_gap_and_with_the_number_of_rollouts():
    by_gap = [float(form([-1.0] * 4, v)["weight"][0]) for v in (-0.4, 0.0, 0.4, 0.9)]
    by_n = [float(form([-1.0] * n, 0.2)["weight"][0]) for n in (1, 2, 4, 16)]
    assert by_gap == sorted(by_gap) and by_n == sorted(by_n) and by_gap[0] < by_gap[-1] and by_n[0] < by_n[-1]


def test_equal_rewards_keep_what_the_prior_says_about_them():
    out = form([1.0] * 4, 0.9)
    assert out["advantages"].tolist() == pytest.approx([0.1] * 4)
    assert form([1.0] * 4, 1.0)["advantages"].tolist() == [0] * 4


def test_a_group_of_one_is_trained_against_its_prior():
    assert form([-1.0], 0.5)["advantages"].tolist() == pytest.approx([-1 - (0.5 + (1 - 1 / 1.5**2) * -1.5)])


def test_without_a_prior_the_rewards_are_centred():
    out = form([1.0, 0.0, 0.5], None)
    assert out["advantages"].tolist() == pytest.approx([0.5, -0.5, 0]) and out["weight"].tolist() == [1] * 3


def test_an_affine_map_of_rewards_prior_and_range_scales_the_advantages():
    rewards, prior = [1.0, -1.0, -1.0, -1.0], 0.7
    mapped = form([3 * r + 5 for r in rewards], 3 * prior + 5, {"r_min": 2.0, "r_max": 8.0})
    assert mapped["advantages"].tolist() == pytest.approx([3 * a for a in form(rewards, prior)["advantages"].tolist()])


def test_the_prior_is_clipped_to_the_range_and_rewards_outside_are_warned_of():
    assert form([1.0, 1.0], 3.0)["baseline"].tolist() == [1, 1]
    with pytest.warns(UserWarning, match="variance bound does not hold"):
        form([2.0, 0.0], 0.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        form([1.0, None], 0.0)


def test_the_batch_scale_divides_by_the_spread_of_all_advantages_or_by_nothing():
    rewards, group = [1.0, -1.0, -1.0, 1.0], [0, 0, 1, 1]
    plain = form(rewards, 0.3, group=group)["advantages"]
    scaled = form(rewards, 0.3, {"scale": "batch"}, group)["advantages"]
    assert scaled.tolist() == pytest.approx((plain / (plain.std() + 1e-6)).tolist())
    assert form([1.0], 0.3, {"scale": "batch"})["advantages"].tolist() == pytest.approx([0.7])
    assert form([1.0, 1.0], 0.5, {"scale": "batch"})["advantages"].tolist() == pytest.approx([0.5, 0.5])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equal_advantages_are_left_alone_by_the_batch_scale_whatever_their_rounding(dtype):
    batch = RolloutBatch(
        {
            "rewards": torch.full((7,), 0.3, dtype=dtype),
            "group": torch.zeros(7, dtype=torch.int64),
            "response_mask": torch.ones(7, 1, dtype=torch.bool),
            "value_prior": torch.full((7,), 0.1234, dtype=dtype),
        }
    )
    plain, scaled = (create("advantage", "v05", scale=scale)(batch)["advantages"] for scale in ("none", "batch"))
    torch.testing.assert_close(scaled, plain)


def test_an_empty_range_is_refused():
    with pytest.raises(ConfigError, match="v05.reward_min: must be below reward_max"):
        create("advantage", "v05", reward_min=1.0)


def test_an_unscorable_row_and_group_have_nothing():
    out = form([1.0, None, None], [0.2, 0.2, 0.4], group=[0, 0, 1])
    assert out["advantages"][1:].tolist() == [0, 0] and out["advantages"][0] == pytest.approx(0.8)
    empty = form([None, 3.0], [7.0, 7.0], {"r_min": 2.0, "r_max": 8.0}, group=[0, 1])
    assert (empty["baseline"][0], empty["weight"][0]) == (7.0, 0.0), "without evidence the prior stands"
