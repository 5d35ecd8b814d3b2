"""AERO's allocator: rescue within a budget, rejection of wrong rows, and the counts the advantage needs."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import rlx_plugins as rlx
from rlx_plugins.hosts.table import PROFILE, TableHost, TableTrainer
from rlx_plugins.testing import evaluate

WIDTH = 20
REWARD = st.sampled_from([0, 0, 0, 1, None])
TABLE = st.lists(st.lists(REWARD, min_size=WIDTH, max_size=WIDTH), min_size=1, max_size=5)


def aero(table, seed=0, **params):
    draws = torch.rand(len(table), WIDTH, generator=torch.Generator().manual_seed(seed)).tolist()
    return evaluate("allocator", "aero", {"reward_table": table, "keep_key": draws}, params)


def successes(row, slots):
    return [i for i in slots if row[i] == 1]


@settings(max_examples=60, deadline=None)
@given(TABLE, st.integers(0, 3), st.integers(0, 20))
def test_the_budget_holds_and_the_counts_are_those_of_all_scorable_rows(table, extra, more):
    budget = 4 * len(table) + more
    out = aero(table, n_extra=extra, n_budget=budget)
    assert out["generated"] <= budget and out["generated"] + out["budget_left"] == budget
    for row, used, c, n in zip(table, out["used"], out["n_success"], out["n_total"], strict=True):
        assert c == len(successes(row, range(used))) and n == sum(x is not None for x in row[:used])
        assert 4 <= used <= 16


@settings(max_examples=60, deadline=None)
@given(TABLE, st.integers(0, 99))
def test_kept_rows_hold_both_classes_and_every_success(table, seed):
    out = aero(table, seed)
    for row, used, status, kept, c in zip(
        table, out["used"], out["status"], out["keep"], out["n_success"], strict=True
    ):
        assert all(row[i] is not None for i in kept) and kept == sorted(kept)
        if status in ("partial", "high"):
            assert successes(row, kept) == successes(row, range(used))
        if status == "partial":
            assert len(kept) - c == min(sum(x == 0 for x in row[:used]), max(1, c))
        if status in ("unsolved", "all_correct"):
            assert len(kept) == min(out["n_total"][table.index(row)], 4)


def test_a_rescue_prompt_draws_until_its_first_success_and_no_further():
    out = aero([[0] * 7 + [1] + [0] * 12, [0] * WIDTH], n_budget=99)
    assert out["used"] == [8, 16]
    assert out["rescue_rounds"] == [[[0, 2], [1, 2]], [[0, 2], [1, 2]], *([[1, 2]] for _ in range(4))]


def test_a_success_of_the_first_wave_does_not_end_a_rescue():
    out = aero([[1, 0, 0, 0, 0, 0, 1] + [0] * 13], rescue_below=0.25, n_budget=99)
    assert (out["stratum"], out["used"], out["n_success"]) == (["rescue"], [8], [2])


def test_without_extra_or_budget_it_is_one_wave_and_rejection():
    table = [[0] * WIDTH, [1, 0] * 10]
    for params in ({"n_extra": 0}, {"n_budget": 8}):
        out = aero(table, **params)
        assert out["used"] == [4, 4] and out["rescue_rounds"] == []


def test_with_large_shares_nothing_scorable_is_rejected():
    out = aero([[1, 0, 0, 0] * 5, [0, None] * 10], neg_per_pos=50, n_homogeneous=50)
    assert [len(kept) for kept in out["keep"]] == out["n_total"]


def test_a_prompt_nobody_could_score_is_unsolved_and_leaves_the_batch():
    out = aero([[None] * WIDTH, [1, 0] * 10])
    assert (out["status"][0], out["keep"][0], out["n_total"][0], out["used"][0]) == ("unsolved", [], 0, 12)


def test_rounding_is_half_up_and_at_least_one_wrong_row_stays():
    table = [[1] + [0] * 19]
    assert len(aero(table, neg_per_pos=1.5)["keep"][0]) == 1 + 2
    assert len(aero(table, neg_per_pos=0)["keep"][0]) == 1 + 1


def test_an_infinite_reward_is_not_a_success():
    out = aero([[math.inf] + [0] * 19])
    assert (out["n_success"], out["n_total"][0]) == ([0], out["used"][0] - 1)


def test_rows_that_agree_demand_the_posterior_advantage():
    assert rlx.build({"allocator": "aero"}, PROFILE).one("advantage").name == "aero"
    with pytest.raises(rlx.ConfigError, match="allocator aero works with advantage=aero only, got advantage=grpo"):
        rlx.build({"allocator": "aero", "advantage": "grpo"}, PROFILE)
    other = {"allocator": {"name": "aero", "n_homogeneous": 0}, "advantage": "grpo"}
    assert rlx.build(other, PROFILE).one("advantage").name == "grpo"


@pytest.mark.parametrize("kept, homogeneous", [(4, "zero"), (0, "bernoulli"), (0, "constant")])
def test_rows_are_kept_for_an_advantage_that_trains_them_and_for_none_else(kept, homogeneous):
    parts = {"allocator": {"name": "aero", "n_homogeneous": kept}, "advantage": {"name": "aero"}}
    parts["advantage"]["homogeneous"] = homogeneous
    for wrong in (parts, {"method": {"name": "aero", "n_homogeneous": kept, "homogeneous": homogeneous}}):
        with pytest.raises(
            rlx.ConfigError, match=f"'{homogeneous}' does not go with allocator aero.n_homogeneous={kept}"
        ):
            rlx.build(wrong, PROFILE)


@pytest.mark.parametrize(
    ("params", "field"), [({"rescue_below": 0.5}, "rescue_below"), ({"max_per_prompt": 3}, "max_per_prompt")]
)
def test_parameters_that_exclude_each_other_are_refused(params, field):
    with pytest.raises(rlx.ConfigError, match=f"allocator aero.{field}"):
        rlx.create("allocator", "aero", **params)


def test_in_a_run_the_advantage_counts_rejected_rows_and_no_kept_row_has_advantage_0():
    trainer = TableTrainer({"method": "aero"}, host=TableHost(24), groups=8, max_tokens=8)
    ctx = trainer.context()
    batch = trainer.rollouts(ctx)
    by_key = {g.prompt_key: g for g in ctx.started}
    for i, key in enumerate(batch.prompt_key):
        assert batch.n_total[i] == len(by_key[key].rollouts)
        assert batch.n_success[i] == sum(r.reward > 0.5 for r in by_key[key].rollouts)
    assert batch.size < sum(len(g.rollouts) for g in ctx.started) <= 8 * 8
    prepared = rlx.prepare(trainer.parts, batch).batch
    assert bool((prepared.advantages[prepared.response_mask] != 0).all())
    unsolved = prepared.n_success == 0
    assert unsolved.any()
    expected = -((1 / (prepared.n_total + 1)) ** 0.5)  # -sqrt(u / (1 - u)) with u = 1 / (n + 2)
    torch.testing.assert_close(prepared.advantages[unsolved, 0], expected[unsolved])


def test_with_no_rows_of_agreeing_groups_such_groups_leave_the_batch():
    config = {"method": {"name": "aero", "n_homogeneous": 0, "homogeneous": "zero"}}
    trainer = TableTrainer(config, host=TableHost(24), groups=12, max_tokens=8)
    batch = trainer.rollouts(trainer.context())
    assert bool((batch.groups.max(batch.rewards) > batch.groups.min(batch.rewards)).all())
    assert len(batch.groups.ids) < 12
