"""Allocators that stop early or go on per prompt: AR3PO's stages, DARS' second stage, Orchard's strides."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import rlx_plugins as rlx
from rlx_plugins.allocation.orchard_bar import ABORTED, COMPLETED, TRUNCATED, Trajectory
from rlx_plugins.hosts.table import TableHost, TableTrainer
from rlx_plugins.testing import evaluate

ROWS = st.lists(st.lists(st.sampled_from([0, 0, 1, 0.5, None]), min_size=16, max_size=16), min_size=1, max_size=5)


def run(config, **settings):
    given = {"groups": 12, "group_size": 6, "max_tokens": 8} | settings
    trainer = TableTrainer({"allocator": config}, host=TableHost(24), **given)
    ctx = trainer.context()
    return trainer.rollouts(ctx), ctx


# ---- ar3po


def ar3po(table, **params):
    return evaluate("allocator", "ar3po", {"reward_table": table}, params)


@settings(max_examples=60, deadline=None)
@given(ROWS, st.integers(1, 4), st.integers(1, 4))
def test_ar3po_counts_are_whole_stages_up_to_the_first_correct_response(table, stages, k):
    out = ar3po(table, stages=stages, per_stage=k)
    for row, n, solved in zip(table, out["counts"], out["solved"], strict=True):
        first = next((i for i, x in enumerate(row[: stages * k]) if x == 1), None)
        assert solved == (first is not None)
        assert n == (stages * k if first is None else (first // k + 1) * k)
    assert all(set(b) <= set(a) for a, b in zip(out["active"], out["active"][1:]))
    assert out["needs_reuse"] == [i for i, s in enumerate(out["solved"]) if not s]


def test_ar3po_partial_credit_does_not_stop_a_prompt_but_mixes_its_group():
    out = ar3po([[0.5] + [0] * 15, [None] * 16])
    assert (out["counts"], out["mixed"], out["solved"]) == ([8, 8], [True, False], [False, False])
    assert ar3po([[0.5] * 16], correct_at=0.5)["counts"] == [4]


@pytest.mark.parametrize(("p", "cost"), [(1.0, 1.0), (0.0, 3.0), (0.5, 1 + 0.25 + 0.0625)])
def test_ar3po_expected_cost(p, cost):
    assert rlx.create("allocator", "ar3po", stages=3, per_stage=2).expected_stages(p) == pytest.approx(cost)


def test_ar3po_in_a_run_spends_more_on_the_unsolved():
    batch, ctx = run("ar3po")
    sizes = {g.prompt_key: len(g.rollouts) for g in ctx.started}
    assert (
        set(sizes.values()) == {4, 8} and batch.size == sum(sizes.values()) == ctx.metrics["allocator/ar3po_rollouts"]
    )
    for g in ctx.started:
        assert (len(g.rollouts) == 4) == any(r.reward == 1 for r in g.rollouts[:4])


# ---- dars


def extra_of(successes, n=8, **params):
    rows = [[1] * c + [0] * (n - c) for c in successes]
    pool = [[0] * 64 for _ in rows]
    out = evaluate("allocator", "dars", {"rewards_stage1": rows, "rewards_stage2": pool}, params)
    return out["extra"]


def test_dars_gives_the_papers_numbers():
    assert extra_of([0, 1, 2, 3, 4, 8]) == [24, 11, 3, 1, 0, 0]
    assert extra_of([0, 1, 2, 3, 4], n_max=64, schedule="HW") == [56, 24, 8, 3, 0]


def test_dars_does_not_round_a_whole_number_up():
    assert extra_of([6], 18, n_max=99, schedule="HW") == [9] and extra_of([8], 20, n_max=99, schedule="HW") == [5]


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 16), st.integers(0, 16), st.sampled_from(["ET", "HW"]), st.booleans(), st.integers(1, 200))
def test_dars_reaches_its_target_with_the_fewest_rollouts(n, c, schedule, use_std, n_max):
    if c > n:
        return
    (extra,) = extra_of([c], n, schedule=schedule, use_std=use_std, n_max=n_max)
    u = c / n or 0.5 / n
    mass, peak = (2 * math.sqrt(u * (1 - u)), n) if use_std else (2 * u * (1 - u), n / 2)
    target = peak if schedule == "ET" else 2 * (1 - u) * peak
    assert 0 <= extra <= max(n_max - n, 0)
    if u >= 0.5:
        assert extra == 0
    elif extra < n_max - n:
        assert (n + extra) * mass >= target - 1e-6
        assert extra == 0 or (n + extra - 1) * mass < target + 1e-6


def test_dars_counts_finished_rollouts_only_and_drops_a_prompt_without_any():
    rows = {"rewards_stage1": [[1, None, 0, None], [None] * 4], "rewards_stage2": [[0] * 9, [0] * 9]}
    out = evaluate("allocator", "dars", rows, {})
    assert (out["extra"], out["group_size"], out["keep"]) == ([0, 0], [2, 0], [True, False])


def test_dars_thresholds_rewards_for_the_allocation_and_trains_their_mean():
    rows = {"rewards_stage1": [[0.4, 0.4, 0.4, 0.9]], "rewards_stage2": [[0.4] * 40]}
    out = evaluate("allocator", "dars", rows, {})
    assert out["extra"] == extra_of([1], 4) and out["keep"] == [True]
    assert evaluate("allocator", "dars", rows, {"upper_threshold": 0.3})["keep"] == [False]


def test_dars_in_a_run_trains_mixed_groups_only():
    batch, ctx = run({"name": "dars", "first_wave": 4, "max_per_prompt": 9})
    assert bool((batch.groups.max(batch.rewards) > batch.groups.min(batch.rewards)).all())
    sizes = [len(g.rollouts) for g in ctx.started]
    assert max(sizes) == 9 and min(sizes) == 4
    assert len(batch.groups.ids) == 12 - ctx.metrics["allocator/dars_dropped"]


# ---- orchard_bar

TRAJECTORY = st.tuples(
    st.sampled_from([-1, 1]), st.sampled_from(["completed", "truncated", "aborted"]), st.integers(1, 9)
)


def bar(streams, **params):
    rows = [[{"reward": r, "status": s, "length": n} for r, s, n in row] for row in streams]
    return evaluate("allocator", "orchard_bar", {"streams": rows}, params)


@settings(max_examples=80, deadline=None)
@given(st.lists(TRAJECTORY, min_size=12, max_size=12), st.integers(1, 6), st.sampled_from([3, 4, 6, 12]))
def test_a_balanced_group_has_its_share_and_the_first_of_each_class(row, size, stride):
    out = bar([row], size=size, n_max=12, stride=stride)
    members, n = out["group"][0], out["generated"][0]
    assert n <= 12 and len(members) == min(size, n)
    if out["stage"] == ["balanced"]:
        assert math.ceil(0.375 * size) <= out["positives"][0] <= math.floor(0.625 * size)
    if out["usable"] == [True]:
        order = {"completed": 0, "truncated": 1}
        for sign in (-1, 1):
            ours = [(order[row[i][1]], row[i][2], i) for i in members if row[i][0] == sign]
            others = [
                (order[row[i][1]], row[i][2], i)
                for i in range(n)
                if i not in members and row[i][0] == sign and row[i][1] != "aborted"
            ]
            assert ours == sorted(ours) and (not ours or not others or max(ours) < min(others))
    finer = bar([row], size=size, n_max=12, stride=3)["generated"][0]
    assert finer <= n or stride == 4


def test_a_single_class_and_an_aborted_member_make_a_group_unusable():
    out = bar(
        [[(1, "completed", 3)] * 4, [(1, "completed", 3)] * 2 + [(-1, "aborted", 3)] * 2], size=4, n_max=4, stride=4
    )
    assert (out["stage"], out["usable"]) == (["relaxed", "best_effort"], [False, False])


def test_an_odd_group_rounds_its_successes_up():
    rows = [[(1, "completed", 1)] * 6 + [(-1, "completed", 1)] * 6]
    assert bar(rows, size=5, n_max=12, stride=12, rho_min=0.2, rho_max=0.8)["positives"] == [3]


def test_a_stride_that_does_not_divide_the_bound_is_cut():
    assert bar([[(1, "completed", 1)] * 9], size=4, n_max=9, stride=4)["generated"] == [9]


def test_the_outcome_of_a_rollout_is_read_off_its_end():
    part = rlx.create("allocator", "orchard_bar")
    group = rlx.Group("g", "p", [])
    done, cut, lost, unscored = group.start(4)
    done.finish("eos")
    cut.finish("length")
    unscored.finish("eos")
    done.reward, cut.reward, unscored.reward, lost.state = 1.0, 0.0, math.nan, "pruned"
    assert [t.rank for t in part.trajectories(group)] == [COMPLETED, TRUNCATED, ABORTED, ABORTED]
    assert part.usable([Trajectory(0.0, COMPLETED, 1)] * 8) is False


def test_dropped_prompts_are_replaced_a_bounded_number_of_times():
    config = {"name": "orchard_bar", "size": 4, "max_per_prompt": 8, "stride": 4}
    batch, ctx = run(config, groups=6)
    assert set(batch.groups.sizes.tolist()) == {4} and len(batch.groups.ids) == 6 < len(ctx.started)
    shares = batch.groups.mean(batch.rewards)
    assert bool(((shares > 0) & (shares < 1)).all())
    part = rlx.create("allocator", "orchard_bar", max_rounds=2)
    ctx = rlx.Context(0, 1, 3, 1, 1, {})
    assert [part.intake(3, ctx)[1] for _ in range(3)] == [3, 3, 0]
    assert part.intake(3, rlx.Context(1, 2, 3, 1, 1, {}))[1] == 3


@pytest.mark.parametrize(
    ("name", "params", "field"),
    [("orchard_bar", {"size": 20}, "size"), ("orchard_bar", {"share_low": 0.9}, "share_low")],
)
def test_parameters_that_exclude_each_other_are_refused(name, params, field):
    with pytest.raises(rlx.ConfigError, match=f"{name}.{field}"):
        rlx.create("allocator", name, **params)
