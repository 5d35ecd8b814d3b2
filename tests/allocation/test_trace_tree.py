"""TRACE's two stages, the predictor behind them, and the values it is trained towards."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import rlx_plugins as rlx
from rlx_plugins.allocation.trace_tree import TREE, Features, backup, root_gain
from rlx_plugins.hosts.table import BAD, PROFILE, TableHost, TableTrainer
from rlx_plugins.testing import evaluate

VALUE = st.floats(0, 1).map(lambda x: round(x, 2))
ROLLOUTS = st.lists(st.tuples(st.integers(0, 1), st.lists(VALUE, max_size=3)), max_size=4)


def trace(values, total, stage1, rollouts=(), **params):
    rows = [{"prompt": 0, "outcome": r, "prefix_value": list(v)} for r, v in rollouts]
    inputs = {"root_value": values, "total_budget": total, "stage1_budget": stage1, "rollouts": rows}
    return evaluate("allocator", "trace_tree", inputs, params)


def chance_mixed(v, m):
    return 1 - v**m - (1 - v) ** m


@settings(max_examples=60, deadline=None)
@given(st.lists(VALUE, min_size=1, max_size=3), st.integers(0, 6))
def test_the_first_stage_is_the_best_there_is(values, more):
    n = len(values)
    out = trace(values, 99, n + more)
    assert sum(out["root_alloc"]) + out["root_left"] == n + more and min(out["root_alloc"]) >= 1
    plans = itertools.product(range(1, more + 2), repeat=n)
    best = max(sum(map(chance_mixed, values, plan)) for plan in plans if sum(plan) <= n + more)
    assert out["root_value"] == pytest.approx(best, abs=1e-12)


def test_a_prompt_whose_outcome_is_sure_keeps_the_floor():
    out = trace([0.0, 1.0, 0.5], 99, 9)
    assert out["root_alloc"] == [1, 1, 7]
    assert trace([0.0, 1.0], 99, 9)["root_left"] == 7
    assert trace([0.5, 0.5], 99, 9, root_cap=3)["root_alloc"] == [3, 3]


def test_an_unknown_value_is_one_half_and_others_are_clipped():
    assert trace([None, 0.9, 0.9], 9, 6) == trace([0.5, 0.9, 0.9], 9, 6)
    assert trace([1.7, 0.4], 9, 6)["root_alloc"] == trace([1.0, 0.4], 9, 6)["root_alloc"]


@settings(max_examples=60, deadline=None)
@given(VALUE, st.integers(1, 9))
def test_the_gain_is_the_difference_of_the_chances_and_symmetric(v, m):
    assert root_gain(v, m) == pytest.approx(chance_mixed(v, m + 1) - chance_mixed(v, m), abs=1e-12)
    assert root_gain(v, m) == pytest.approx(root_gain(1 - v, m), abs=1e-12)


@settings(max_examples=60, deadline=None)
@given(ROLLOUTS, st.integers(0, 12), st.integers(0, 4))
def test_the_second_stage_spends_what_brings_a_gain(rollouts, budget, cap):
    out = trace([0.5], 1 + budget, 1, rollouts, anchor_cap=cap)
    assert sum(k for *_, k in out["anchors"]) + out["prefix_left"] == budget
    assert all(1 <= k <= cap for *_, k in out["anchors"])
    flipped = [(1 - r, [1 - v for v in values]) for r, values in rollouts]
    # 1 - (1 - v) is not always v: a tie may fall the other way by rounding
    assert out["prefix_left"] == trace([0.5], 1 + budget, 1, flipped, anchor_cap=cap)["prefix_left"]


def test_the_surprising_prefixes_come_first_and_sure_ones_never():
    out = trace([0.5], 4, 1, [(1, [0.9, 0.2]), (0, [0.8, 0.0]), (1, [1.0])])
    assert out["anchors"] == [[0, 1, 1], [1, 0, 2]] or sum(k for *_, k in out["anchors"]) == 3
    assert [1, 1] not in [a[:2] for a in out["anchors"]] and [2, 0] not in [a[:2] for a in out["anchors"]]
    assert trace([0.5], 9, 1, [(1, [])])["prefix_left"] == 8 == trace([0.5], 9, 1, [(1, [1.0])])["prefix_left"]


def test_a_cold_predictor_spreads_one_continuation_per_anchor_in_order():
    assert trace([0.5], 4, 1, [(1, [0.5, 0.5]), (0, [0.5, 0.5])])["anchors"] == [[0, 0, 1], [0, 1, 1], [1, 0, 1]]


def test_too_small_a_first_stage_is_refused():
    with pytest.raises(
        rlx.DataError, match="2 rollouts in the first stage are fewer than min_per_prompt=1 for each of 3"
    ):
        trace([0.5] * 3, 9, 2)
    for params, name in (
        ({"max_per_prompt": 1, "min_per_prompt": 2}, "max_per_prompt"),
        ({"boundary_tokens": ()}, "b"),
    ):
        with pytest.raises(rlx.ConfigError, match=f"trace_tree.{name}"):
            rlx.create("allocator", "trace_tree", **params)


def test_values_are_backed_up_weighted_by_leaves():
    tree = {"root": ["a", "b", "c"], "a": ["x", "y"], "b": ["gone"]}
    assert backup(tree, {"x": 1.0, "y": 0.0, "c": 0.0}) == {"a": (0.5, 2), "root": (pytest.approx(1 / 3), 3)}


def test_a_groups_tree_hangs_forks_below_the_turn_they_continue():
    part = rlx.create("allocator", "trace_tree", boundary_tokens=[7])
    g = rlx.Group("g", "p", [1])
    first, second = g.start(2)
    first.segments = [rlx.Segment([1, 7, 2, 7, 3])]
    second.segments = [rlx.Segment([4])]
    (early,) = g.fork(first, 2, 1)
    (late,) = g.fork(first, 4, 1)
    for r, reward in ((first, 0.0), (second, 0.0), (early, 1.0), (late, 1.0)):
        r.finish("eos")
        r.reward = reward
    h = torch.zeros(2, dtype=torch.float64)
    g.extras[TREE] = Features(h, {0: [(2, h), (4, h)]})
    values = backup(*part.tree(g))
    assert values == {(0, 1): (0.5, 2), (0, 0): (pytest.approx(2 / 3), 3), "root": (0.5, 4)}


def run(**own):
    part = {"name": "trace_tree", "boundary_tokens": [BAD], "learning_rate": 0.1, **own}
    return TableTrainer(
        {"allocator": part}, host=TableHost(24), groups=8, group_size=5, max_tokens=10, learning_rate=1e-9
    )


def test_in_a_run_prefixes_are_continued_and_the_predictor_learns():
    trainer = run(learning_rate=0.5)
    ctx = trainer.context()
    batch = trainer.rollouts(ctx)
    assert batch.size == sum(len(g.rollouts) for g in ctx.started) == 40
    tags = [(g, r) for g in ctx.started for r in g.rollouts if r.tag]
    assert len(tags) == ctx.metrics["allocator/trace_tree_continued"] > 8
    for g, r in tags:
        slot, at = r.forked
        assert r.tokens[:at] == g.rollouts[slot].tokens[:at] and r.tokens[at - 1] == BAD and not g.rollouts[slot].tag
    trainer = run(learning_rate=0.5)
    trainer.run(3)
    assert all(0 < entry["allocator/trace_tree_error"] < 0.5 for entry in trainer.log)
    values = [
        trainer.parts.one("allocator").predict(h) for h in trainer.host.execute(rlx.Forward(_empty(trainer), "hidden"))
    ]
    assert len({round(v, 3) for v in values}) > 4 and all(0 < v < 1 for v in values)


def _empty(trainer):
    return [rlx.Rollout(key, key, 0, prompt) for key, prompt in trainer.host.prompts.items()]


def test_the_predictors_gradient_is_that_of_the_cross_entropy():
    part = rlx.create("allocator", "trace_tree", learning_rate=0.25)
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(6, 3, generator=generator).double(), torch.rand(6, generator=generator).double()
    part.weight, part.bias = [0.1, -0.2, 0.3], 0.05
    w = torch.tensor([*part.weight, part.bias], dtype=torch.float64, requires_grad=True)
    torch.nn.functional.binary_cross_entropy_with_logits(x @ w[:3] + w[3], y).backward()
    part._learn(x, y)
    expected = w.detach() - 0.25 * w.grad
    torch.testing.assert_close(torch.tensor([*part.weight, part.bias], dtype=torch.float64), expected)


def test_it_needs_hidden_states_and_turns():
    host = rlx.HostProfile("any", PROFILE.signals, PROFILE.capabilities - {"forward:hidden"})
    with pytest.raises(rlx.ConfigError, match="forward:hidden"):
        rlx.build({"allocator": {"name": "trace_tree", "boundary_tokens": [1]}}, host)
    assert "tools" in rlx.create("allocator", "trace_tree").capabilities
    assert math.isclose(rlx.create("allocator", "trace_tree").predict(torch.ones(3)), 0.5)
