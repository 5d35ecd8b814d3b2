"""XRPO's allocator: quantiles, priorities, and rounds that may come back to a prompt they passed over."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import rlx_plugins as rlx
from rlx_plugins.allocation._student import two_sided_quantile
from rlx_plugins.hosts.table import TableHost, TableTrainer
from rlx_plugins.testing import evaluate

REWARDS = st.lists(st.lists(st.sampled_from([0, 1, 0.5]), min_size=2, max_size=6), min_size=1, max_size=5)


def xrpo(rewards, budgets, pool=(0, 1), **params):
    pools = [list(pool) * 50 for _ in rewards]
    inputs = {"rewards": rewards, "budget_per_round": budgets, "pools": pools}
    return evaluate("allocator", "xrpo", inputs, params)


@pytest.mark.parametrize(("degrees", "t"), [(1, 12.706205), (3, 3.182446), (7, 2.364624), (30, 2.042272)])
def test_the_quantiles_are_those_of_the_tables(degrees, t):
    assert two_sided_quantile(0.05, degrees) == pytest.approx(t, abs=1e-6)


@pytest.mark.parametrize("degrees", [1, 2])
@pytest.mark.parametrize("outside", [0.01, 0.1, 0.2])
def test_the_quantiles_of_few_degrees_have_a_closed_form(degrees, outside):
    if degrees == 1:
        expected = math.tan(math.pi / 2 * (1 - outside))
    else:
        inside = 1 - outside
        expected = inside * math.sqrt(2 / (1 - inside**2))
    assert two_sided_quantile(outside, degrees) == pytest.approx(expected, rel=1e-12)


@settings(max_examples=60, deadline=None)
@given(REWARDS, st.lists(st.integers(0, 12), min_size=1, max_size=3))
def test_every_round_gives_out_its_budget(rewards, budgets):
    out = xrpo(rewards, budgets)
    assert [sum(entry["add"]) for entry in out["rounds"]] == budgets
    assert sum(out["counts"]) == sum(map(len, rewards)) + sum(budgets)


def test_a_full_prompt_gets_nothing_and_when_all_are_full_the_rest_is_not_spent():
    out = xrpo([[0, 1, 0], [1, 1, 1]], [9], n_cap=5)
    assert out["counts"] == [5, 5]


def test_without_the_bonus_a_constant_prompt_gets_nothing_while_a_mixed_one_is_there():
    out = xrpo([[1, 1, 1], [0, 1, 1], [0, 0, 0]], [6], lam=0)
    assert out["rounds"][0]["add"] == [0, 6, 0]


def test_without_bonus_and_spread_the_first_prompt_gets_all():
    assert xrpo([[1, 1], [0, 0]], [3], lam=0)["rounds"][0]["add"] == [3, 0]


def test_equal_statistics_get_counts_that_differ_by_at_most_one():
    counts = xrpo([[0, 1, 1]] * 4, [7])["counts"]
    assert max(counts) - min(counts) <= 1


@settings(max_examples=40, deadline=None)
@given(st.integers(2, 40), st.floats(0.01, 5))
def test_a_further_rollout_narrows_less_and_in_proportion_to_the_spread(n, std):
    part = rlx.create("allocator", "xrpo")
    here, later = part.narrowing(n, std), part.narrowing(n + 1, std)
    assert here > later > 0
    assert part.narrowing(n, 2 * std) == pytest.approx(2 * here)
    assert part.narrowing(n, 0.0) == 0


def test_a_nan_reward_counts_in_n_and_not_in_the_spread():
    out = xrpo([[1, 0, None, None], [1, 0, 1, 1]], [0])
    assert out["rounds"][0]["n"] == [4, 4]
    assert out["rounds"][0]["std"] == pytest.approx([math.sqrt(0.5), 0.5])


def test_equal_spreads_are_ties_and_equal_rewards_have_none():
    assert xrpo([[1, 1, 0, 0], [None, 0, 1, 0], [1, 0, 0, 0]], [4])["rounds"][0]["add"] == [2, 1, 1]
    assert xrpo([[0, 0, 0], [0.1, 0.1, 0.1]], [2], lam=0)["rounds"][0]["add"] == [2, 0]


def test_one_rollout_has_no_interval():
    with pytest.raises(rlx.DataError, match="needs two rollouts"):
        xrpo([[1], [0, 1]], [1])
    with pytest.raises(rlx.ConfigError, match="xrpo.first_wave"):
        rlx.create("allocator", "xrpo", first_wave=1)
    with pytest.raises(rlx.ConfigError, match="xrpo.max_per_prompt"):
        rlx.create("allocator", "xrpo", max_per_prompt=3)


def test_prompts_without_a_positive_reward_are_reported():
    assert xrpo([[0, 0], [0, 1], [0, 0]], [1], pool=(0,))["zero_reward"] == [0, 2]


def test_in_a_run_the_step_spends_group_size_per_prompt_in_unequal_groups():
    trainer = TableTrainer({"allocator": "xrpo"}, host=TableHost(24), groups=8, group_size=6, max_tokens=8)
    ctx = trainer.context()
    batch = trainer.rollouts(ctx)
    sizes = [len(g.rollouts) for g in ctx.started]
    assert sum(sizes) == batch.size == 48 and min(sizes) >= 4 and len(set(sizes)) > 1
    assert ctx.metrics["allocator/xrpo_rollouts"] == 48
