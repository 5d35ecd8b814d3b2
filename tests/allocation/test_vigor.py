"""VIGOR: rounds, ranking, budget."""

import math

import pytest

import rlx_plugins as rlx
from rlx_plugins.testing import evaluate

MIXED, ONES = [1, 0] * 20, [1] * 40


def vigor(table, **params):
    return evaluate("allocator", "vigor", {"reward_table": table}, params)


def test_without_selection_and_growth_every_prompt_gets_the_same():
    out = vigor([MIXED, ONES, [0] * 40], m0=3, rounds=4, alpha=1, gamma=1)
    assert out["counts"] == [12, 12, 12]
    assert out["eta"] == pytest.approx(1)


def test_the_total_is_the_planned_one_where_the_shares_are_whole():
    out = vigor([[i % (k + 2) == 0 for i in range(40)] for k in range(8)], rounds=4)
    assert out["total"] == 8 * out["planned_per_prompt"] == 64
    assert sorted(out["counts"]) == [2, 2, 2, 2, 6, 6, 14, 30]


def test_flipping_or_shifting_all_rewards_changes_nothing():
    table = [[0, 1, 1, 0, 1] * 8, [1, 0, 0, 0, 0] * 8, ONES, [0, 0, 1, 1, 0] * 8]
    counts = vigor(table)["counts"]
    assert vigor([[1 - r for r in row] for row in table])["counts"] == counts
    assert vigor([[r + 5 for r in row] for row in table])["counts"] == counts


@pytest.mark.parametrize("change", [lambda r: r, lambda r: 1 - r, lambda r: r + 0.1])
def test_equal_variances_are_ties_whatever_the_rewards_and_their_order(change):
    # After six rollouts both mixed prompts have variance 5/36: the first goes on.
    table = [[1, 1, 1, 0, 1, 1] + MIXED, [1, 0, 1, 1, 1, 1] + MIXED, ONES, ONES]
    assert vigor([[change(r) for r in row] for row in table], rounds=3)["counts"] == [14, 6, 2, 2]


def test_a_constant_prompt_never_gets_more_than_a_mixed_one():
    counts = vigor([ONES, MIXED, [0] * 40, MIXED])["counts"]
    assert max(counts[0], counts[2]) < min(counts[1], counts[3])


def test_when_all_are_tied_the_first_prompts_go_on():
    assert vigor([ONES] * 4)["counts"] == [30, 6, 2, 2]


def test_a_nan_reward_ranks_as_zero():
    with_nan = [1, math.nan] * 20
    out = vigor([[1, 1] * 20, with_nan])
    assert out["rounds"][0]["variance"] == [0, 0.25]
    assert out["counts"] == [2, 30]


def test_the_cap_stops_the_drawing_in_the_order_of_the_batch():
    out = vigor([MIXED] * 4, max_total=13)
    assert out["counts"] == [6, 3, 2, 2]
    assert out["rounds"][1]["drawn"] == [4, 1]


def test_a_first_wave_of_one_is_refused():
    with pytest.raises(rlx.ConfigError, match="vigor.first_wave"):
        rlx.create("allocator", "vigor", first_wave=1)


def test_it_is_refused_beside_a_pruner_that_ends_generation_early():
    profile = rlx.HostProfile("any", frozenset({"logp_old"}), frozenset(rlx.core.host.CAPABILITIES))
    with pytest.raises(rlx.ConfigError, match="waits for every row"):
        rlx.build({"allocator": "vigor", "pruner": "april"}, profile)
