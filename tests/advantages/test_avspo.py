"""AVSPO: virtual rewards for collapsed groups, and its adaptive threshold."""

import math
import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlx_plugins import RolloutBatch, create


def batch(rewards, group):
    rewards = torch.tensor(rewards, dtype=torch.float64)
    mask = torch.ones(len(rewards), 2, dtype=torch.bool)
    return RolloutBatch({"rewards": rewards, "group": torch.tensor(group), "response_mask": mask})


def step(part, rewards, group):
    columns = part(batch(rewards, group))
    return columns["advantages"][:, 0], columns


def padded(rewards, rate, exponent=0.5, anchor=0.1, eps=1e-8):
    """The advantages of one collapsed group, from its pool written out."""
    n, top = len(rewards), max(rewards)
    k_max = max(1, min(n, math.ceil(n * rate**exponent - 1e-12)))
    if top > 0:
        ladder = [top * (1 - k / (k_max + 1)) for k in range(1, k_max + 1)]
    else:
        ladder = [anchor * (k_max - k + 1) / k_max for k in range(1, k_max + 1)]
    pool = [*rewards, *ladder]
    return [(r - statistics.fmean(pool)) / (statistics.pstdev(pool) + eps) for r in rewards], k_max


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from([-1.0, 0.0, 0.5, 1.0]), st.integers(1, 9)), min_size=1, max_size=5),
    st.integers(0, 3),
    st.sampled_from([0.25, 0.5, 2.0]),
)
def test_collapsed_groups_are_scored_in_a_pool_with_their_virtual_rewards(collapsed, mixed, exponent):
    groups = [[value] * n for value, n in collapsed] + [[0.0, 1.0]] * mixed
    rewards = [r for rows in groups for r in rows]
    ids = [g for g, rows in enumerate(groups) for _ in rows]
    rate = len(collapsed) / len(groups)
    part = create("advantage", "avspo", initial_threshold=0.01, ladder_exponent=exponent)
    got, columns = step(part, rewards, ids)
    want, virtual = [], []
    for value, n in collapsed:
        of_group, k = padded([value] * n, rate, exponent)
        want += of_group
        virtual += [k] * n
        assert all(a * (1 if value > 0 else -1) > 0 and abs(a) <= math.sqrt(k / n) + 1e-9 for a in of_group)
    want += [-1 / (1 + 2e-8), 1 / (1 + 2e-8)] * mixed
    assert got.tolist() == pytest.approx(want, abs=1e-7)
    assert columns["virtual_samples"].tolist() == virtual + [0, 0] * mixed
    assert columns["collapse_rate"] == pytest.approx(rate)


def test_without_a_collapsed_group_it_is_grpo_with_the_population_spread():
    rewards, group = [1.0, 0.0, 0.0, 0.5, 0.25], [0, 0, 0, 1, 1]
    got, columns = step(create("advantage", "avspo"), rewards, group)
    want = create("advantage", "grpo", ddof=0, eps=1e-8)(batch(rewards, group))["advantages"][:, 0]
    torch.testing.assert_close(got, want, rtol=0, atol=1e-9)
    assert columns["collapse_rate"] == 0


def test_below_the_threshold_a_collapsed_group_has_advantage_zero_even_with_rounding_noise():
    part = create("advantage", "avspo", initial_threshold=0.6)
    got, columns = step(part, [0.3, 0.3 + 1e-8, 0.0, 1.0], [0, 0, 1, 1])
    assert columns["collapse_rate"] == 0.5
    assert got[:2].tolist() == [0, 0] and columns["virtual_samples"].tolist() == [0] * 4


def test_the_threshold_stays_at_the_first_step_and_then_follows_the_mean_reward():
    part = create("advantage", "avspo", initial_threshold=0.5, threshold_rate=0.1)
    collapsed = [0, 0, 1, 1]
    assert step(part, [0.0, 0.0, 0.0, 0.0], collapsed)[1]["collapse_threshold"] == 0.5
    assert step(part, [1.0, 1.0, 0.0, 0.0], collapsed)[1]["collapse_threshold"] == pytest.approx(0.55)  # J rose
    assert step(part, [0.0, 0.0, 1.0, 1.0], collapsed)[1]["collapse_threshold"] == pytest.approx(0.55)  # J stayed
    assert step(part, [0.0, 1.0, 0.0, 0.0], collapsed)[1]["collapse_threshold"] == pytest.approx(0.555)  # J fell
    assert part.threshold == pytest.approx(0.555) and part.previous_mean == 0.25


def test_a_restored_part_goes_on_as_if_never_stopped():
    part = create("advantage", "avspo")
    step(part, [0.0, 1.0, 1.0, 1.0], [0, 0, 1, 1])
    resumed = create("advantage", "avspo")
    resumed.load_state_dict(part.state_dict())
    for rewards in ([1.0, 1.0, 1.0, 0.0], [0.0, 0.0, 1.0, 1.0]):
        got, want = step(resumed, rewards, [0, 0, 1, 1]), step(part, rewards, [0, 0, 1, 1])
        assert torch.equal(got[0], want[0]) and got[1]["collapse_threshold"] == want[1]["collapse_threshold"]
    assert resumed.state_dict() == part.state_dict()


def test_a_batch_without_a_scorable_row_gives_zeros_and_leaves_the_state_alone():
    part = create("advantage", "avspo")
    step(part, [0.0, 1.0], [0, 0])
    before = part.state_dict()
    got, columns = step(part, [math.nan, math.nan], [0, 1])
    assert got.tolist() == [0, 0] and columns["collapse_rate"] == 0
    assert part.state_dict() == before


@settings(max_examples=40, deadline=None)
@given(st.lists(st.lists(st.sampled_from([0.0, 1.0]), min_size=4, max_size=4), min_size=1, max_size=12))
def test_the_threshold_stays_between_zero_and_one(steps):
    part = create("advantage", "avspo", threshold_rate=0.9)
    for rewards in steps:
        assert 0 <= step(part, rewards, [0, 0, 1, 1])[1]["collapse_threshold"] <= 1
