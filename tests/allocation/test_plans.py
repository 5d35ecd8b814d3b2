"""Allocators that plan a step from what earlier steps brought: CoBA, E3, DART, HBPO."""

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import rlx_plugins as rlx
from rlx_plugins.allocation.coba import beta_density
from rlx_plugins.hosts.table import BAD, GOOD, TableHost, TableTrainer
from rlx_plugins.testing import evaluate
from rlx_plugins.testing.scripted import ScriptedExecutor

RATES = st.lists(st.sampled_from([0.0, 0.125, 0.25, 0.5, 0.75, 0.875, 1.0]), min_size=1, max_size=5)


# ---- coba


def coba(rates, total, history=(0.6, 0.4), **params):
    inputs = {"pass_rates": rates, "failure_history": list(history), "total_budget": total}
    return evaluate("allocator", "coba", inputs, params)


@settings(max_examples=60, deadline=None)
@given(RATES, st.integers(0, 12), st.integers(3, 9))
def test_the_greedy_plan_is_the_best_there_is(rates, more, b_up):
    total = 2 * len(rates) + more
    out = coba(rates, total, b_up=b_up)
    counts = out["allocation"]
    assert sum(counts) + out["unspent"] == total and all(2 <= n <= b_up for n in counts)
    assert out["alpha"] + out["beta"] == pytest.approx(11)
    if len(rates) > 3:
        return

    def value(p, n, d):
        return (1 - math.exp(-n * p * (1 - p) / 4)) * d if p * (1 - p) else 0.0

    plans = [c for c in itertools.product(range(2, b_up + 1), repeat=len(rates)) if sum(c) == sum(counts)]
    best = max(sum(value(p, n, d) for p, n, d in zip(rates, c, out["density"], strict=True)) for c in plans)
    assert out["objective"] == pytest.approx(best, abs=1e-12)


def test_equal_prompts_differ_by_at_most_one_and_settled_ones_keep_the_minimum():
    counts = coba([0.25] * 4, 23)["allocation"]
    assert max(counts) - min(counts) == 1
    assert coba([0.0, 1.0, 0.5], 20)["allocation"] == [2, 2, 16]


def test_where_nothing_is_worth_more_the_rest_goes_by_position_and_the_sum_is_exact():
    assert coba([0.0, 1.0], 9, b_up=5)["allocation"] == [5, 4]
    assert coba([0.5], 300)["unspent"] == 300 - 128


@settings(max_examples=40, deadline=None)
@given(st.floats(0, 1), st.floats(0, 1))
def test_the_more_fails_the_easier_the_prompts_that_are_favoured(a, b):
    low, high = sorted((a, b))
    first, second = coba([0.5], 4, history=[low] * 9)["alpha"], coba([0.5], 4, history=[high] * 9)["alpha"]
    assert first <= second + 1e-12


@pytest.mark.parametrize(("p", "a", "b", "density"), [(0.25, 2, 3, 12 * 0.25 * 0.75**2), (0, 1, 10, 10), (1, 2, 3, 0)])
def test_the_density_is_that_of_the_beta_law(p, a, b, density):
    assert beta_density(p, a, b) == pytest.approx(density)


def test_a_budget_below_the_minimum_is_refused():
    with pytest.raises(rlx.DataError, match="fewer than min_per_prompt=2 for each of 3 prompts"):
        coba([0.5] * 3, 5)
    with pytest.raises(rlx.ConfigError, match="coba.alpha_max"):
        rlx.create("allocator", "coba", alpha_max=11.0)
    with pytest.raises(rlx.ConfigError, match="coba.min_per_prompt"):
        rlx.create("allocator", "coba", min_per_prompt=3, max_per_prompt=2)


def test_coba_learns_pass_rates_and_its_history_is_bounded():
    config = {"allocator": {"name": "coba", "window": 3}}
    trainer = TableTrainer(config, host=TableHost(12), groups=6, group_size=4, max_tokens=8)
    trainer.run(5)
    part = trainer.parts.one("allocator")
    assert set(part.pass_rates) == {f"p{i}" for i in range(12)} and len(part.failures) == 3
    assert part.failures[0] != 0.5
    assert all(entry["rows"] == 24 for entry in trainer.log)
    ctx = trainer.context()
    trainer.rollouts(ctx)
    assert len({len(g.rollouts) for g in ctx.started}) > 1


# ---- e3


def e3(epochs, **params):
    return evaluate("allocator", "e3", {"epochs": epochs}, params)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(0, 1), min_size=1, max_size=6), st.integers(0, 4))
def test_a_steps_rollouts_are_all_given_out_within_the_bounds(ranks, epochs):
    part = rlx.create("allocator", "e3")
    part.epochs = epochs
    counts, unspent = part.counts(ranks, 8)
    low, high = part.bounds(8)
    assert sum(counts) + unspent == 8 * len(ranks) and all(low <= c <= high for c in counts)
    assert low == max(8 - 2 * epochs, 4) and high == min(8 + 2 * epochs, 12)
    ordered = [c for _, c in sorted(zip(ranks, counts))]
    assert all(a <= b + 1 for a, b in zip(ordered, ordered[1:])) or unspent or max(counts) == high


def test_the_release_lets_the_hardest_prompt_pass_the_maximum():
    part = rlx.create("allocator", "e3", mode="code")
    part.epochs = 2
    assert part.counts([0, 0, 0, 0.9], 8)[0] == [5, 4, 4, 19]
    strict = part.replace(mode="strict")
    strict.epochs = 2
    assert sum(strict.counts([0, 0, 0, 0.9], 8)[0]) == 32 and max(strict.counts([0, 0, 0, 0.9], 8)[0]) == 12


def test_the_first_epoch_is_uniform_and_without_update_all_are():
    batch = {"index": [0, 1, 2], "mean_reward": [1, 0, 0.5]}
    assert e3([[batch, batch]])["log"][1]["counts"] == [8, 8, 8]
    assert [entry["counts"] for entry in e3([[batch]] * 3, n_update=0)["log"]] == [[8, 8, 8]] * 3


def test_an_unscorable_mean_changes_nothing():
    known = [{"index": [0, 1], "mean_reward": [0.5, 0.75]}]
    with_gap = [{"index": [0, 1], "mean_reward": [0.5, 0.75]}, {"index": [0, 1], "mean_reward": [None, None]}]
    assert e3([with_gap])["rank"] == e3([known])["rank"] == [0.5, 0.0]


def test_e3_in_a_run_ranks_the_dataset_when_it_has_gone_through_it():
    trainer = TableTrainer({"allocator": "e3"}, host=TableHost(12), groups=6, group_size=8, max_tokens=8)
    trainer.run(2)
    part = trainer.parts.one("allocator")
    assert part.epochs == 0 and part.rank == {} and len(part.tried) == 12
    trainer.run(1)
    assert part.epochs == 1 and sorted(part.rank.values()) == [i / 12 for i in range(12)]
    mean = {key: part.reward[key] / part.tried[key] for key in part.reward}
    easiest = min(part.rank, key=part.rank.get)
    assert part.rank[easiest] == 0 and mean[easiest] >= max(mean.values()) - 0.5
    assert trainer.log[-1]["rows"] == 48 and trainer.log[-1]["allocator/e3_largest"] == 10


# ---- dart


def dart(history, rewards=((),), pool=(0,), lengths=((),), **params):
    inputs = {"success_history": history, "success_lengths": lengths, "group_rewards": rewards, "pool": pool}
    return evaluate("allocator", "dart", inputs, params)


def test_the_number_falls_from_all_at_the_threshold_to_the_minimum_for_a_task_that_always_succeeds():
    histories = [[1] * k + [0] * (20 - k) for k in range(21)]
    n = len(histories)
    out = dart(histories, [()] * n, [0] * n, [()] * n, n_min=2)["num_rollouts"]
    assert out[:13] == [8] * 13 and out[13] == 7 and out[-1] == 2 and out == sorted(out, reverse=True)
    assert dart([[]])["num_rollouts"] == [8]
    assert dart([[0] * 8 + [1, 1, 1]], window=3)["num_rollouts"] == [1]


def test_only_a_group_without_a_success_gets_a_stored_one():
    def injected(rewards, stored):
        return dart([[]], [rewards], [stored])["inject_from_pool"][0]

    assert [injected((0, 0), 2), injected((0, 1), 2), injected((0, 0), 0), injected((), 2)] == [1, 0, 0, 0]


def test_dart_shortens_stores_and_injects_in_a_run():
    part = rlx.create("allocator", "dart", max_per_prompt=3, pool_size=2)
    ctx = rlx.Context(0, 9, 1, 3, 9, {"p": [7]}, ["p"])
    parts = rlx.Parts({"allocator": [part]})
    first = ScriptedExecutor(lambda r: float(r.slot < 2), length=lambda r: 2 + r.slot, logp=-0.5)
    rlx.drive(rlx.rollout_program(parts, ctx), first)
    assert (part.history, part.longest, len(part.pool["p"])) == ({"p": [1, 1, 0]}, {"p": 3}, 2)
    later = rlx.Context(1, 9, 1, 3, 9, {"p": [7]}, ["p"], version=1)
    (group,) = rlx.drive(rlx.rollout_program(parts, later), ScriptedExecutor(lambda r: 0.0, length=99, version=1))
    assert [r.tag for r in group.rollouts] == ["", "", "", "pooled"]
    assert [len(r) for r in group.rollouts[:3]] == [3, 3, 3]
    batch = rlx.pack([group], version=1)
    assert batch.source[3] == "pooled" and batch.staleness[3, 0] == 1 and batch.logp_rollout[3, 0] == -0.5
    assert len(batch.row_id.unique()) == 4 and len(batch.groups.ids) == 1
    assert part.history["p"] == [1, 1, 0, 0, 0, 0]  # the stored one was not shown again


def test_dart_forgets_what_lies_before_its_window_and_pool():
    part = rlx.create("allocator", "dart", max_per_prompt=3, window=2, pool_size=1)
    ctx = rlx.Context(0, 9, 1, 3, 9, {"p": [7]}, ["p"])
    executor = ScriptedExecutor(lambda r: float(r.slot < 2), length=lambda r: 2 + r.slot)
    rlx.drive(rlx.rollout_program(rlx.Parts({"allocator": [part]}), ctx), executor)
    assert part.history == {"p": [1, 0]} and part.rate("p") == 0.5 and part.rate("other") == 0
    assert [r["slot"] for r in part.pool["p"]] == [1]


def test_dart_refuses_a_minimum_above_the_maximum():
    with pytest.raises(rlx.ConfigError, match="dart.min_per_prompt"):
        rlx.create("allocator", "dart", min_per_prompt=9)


# ---- hbpo


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 20), st.integers(1, 6), st.integers(0, 9))
def test_budgets_take_turns_so_that_all_get_equally_many(group_size, k, start):
    budgets = [10 * (i + 1) for i in range(k)]
    out = evaluate(
        "allocator", "hbpo", {"n_prompts": k, "group_size": group_size}, {"budgets": budgets, "start": start}
    )
    for row, texts in zip(out["budget"], out["texts_needed"], strict=True):
        counts = [row.count(b) for b in budgets]
        assert row == sorted(row) and len(row) == group_size and max(counts) - min(counts) <= 1
        assert texts == sum(c > 0 for c in counts)
    assert [sum(row.count(b) for row in out["budget"]) for b in budgets] == [group_size] * k
    shifted = evaluate(
        "allocator", "hbpo", {"n_prompts": k, "group_size": group_size}, {"budgets": budgets, "start": start + 1}
    )
    assert shifted["budget"][:-1] == out["budget"][1:]


def test_hbpo_tells_the_budget_in_the_response_and_trains_none_of_it():
    config = {"method": {"name": "hbpo", "budgets": [6, 3], "prefixes": [[BAD, BAD], [GOOD]], "max_length": 16}}
    trainer = TableTrainer(config, host=TableHost(12), groups=3, group_size=5, max_tokens=8)
    batch = trainer.rollouts(trainer.context())
    for i, r in enumerate(batch.rollout):
        told = [GOOD] if batch.budget[i] == 3 else [BAD, BAD]
        assert r.tokens[: len(told)] == told and batch.hint_mask[i].sum() == len(told)
        assert not batch.response_mask[i, : len(told)].any() and batch.subgroup[i] == (batch.budget[i] == 6)
    assert [int((batch.budget[batch.group == g] == 3).sum()) for g in range(3)] == [3, 2, 3]
    trainer.run(1)
    assert trainer.parts.one("allocator").prompts == 6
    assert bool(rlx.prepare(trainer.parts, batch).batch.advantages.isfinite().all())


@pytest.mark.parametrize(
    ("params", "field"),
    [({"budgets": [3, 3], "prefixes": [[1], [2]]}, "budgets"), ({"budgets": [3, 4], "prefixes": [[1]]}, "prefixes")],
)
def test_hbpo_refuses_budgets_that_do_not_fit(params, field):
    with pytest.raises(rlx.ConfigError, match=f"hbpo.{field}"):
        rlx.create("allocator", "hbpo", **params)
