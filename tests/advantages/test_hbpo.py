"""HBPO's advantage: within a token budget, and between budgets."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import rlx_plugins as rlx
from rlx_plugins.testing import evaluate

ROW = st.tuples(st.integers(0, 2), st.integers(0, 2), st.sampled_from([0.0, 0.25, 1.0, math.nan]), st.floats(0, 1))


def run(rows, **params):
    names = ("group", "subgroup", "rewards", "baseline")
    return evaluate("advantage", "hbpo", dict(zip(names, map(list, zip(*rows, strict=True)), strict=True)), params)


@settings(max_examples=60, deadline=None)
@given(st.lists(ROW, min_size=1, max_size=12))
def test_a_row_is_scored_by_what_its_budget_earned_and_by_its_place_in_the_group(rows):
    out = run(rows)
    names = {"rewards": [row[2] for row in rows], "group": [row[0] for row in rows]}
    inter = evaluate("advantage", "grpo", names, {"singleton": "zero"})["advantages"]
    torch.testing.assert_close(out["inter"], inter)
    for i, (g, s, r, _) in enumerate(rows):
        level = [(q, b) for h, t, q, b in rows if (h, t) == (g, s) and not math.isnan(q)]
        intra = sum(q - b for q, b in level) / len(level) if level and not math.isnan(r) else 0.0
        assert float(out["intra"][i]) == pytest.approx(intra)
        assert float(out["advantages"][i]) == pytest.approx(intra + float(inter[i]))


def test_a_constant_on_rewards_and_baselines_cancels():
    rows = [(0, 0, 0.5, 0.9), (0, 0, 0.0, 0.9), (0, 1, 1.0, 0.4)]
    moved = [(g, s, r + 3, b + 3) for g, s, r, b in rows]
    torch.testing.assert_close(run(rows)["advantages"], run(moved)["advantages"], rtol=0, atol=1e-6)


def test_a_group_of_wrong_answers_is_pushed_by_its_baselines_and_a_group_of_one_by_its_own():
    out = run([(0, 0, 0.0, 0.9), (0, 1, 0.0, 0.4), (1, 0, 0.7, 0.9)])
    assert out["advantages"].tolist() == pytest.approx([-0.9, -0.4, -0.2])


def test_without_the_inner_comparison_it_is_grpo_and_needs_no_budget():
    rows = [(0, 0, 1.0, 0.9), (0, 0, 0.0, 0.9)]
    without, whole = run(rows, use_intra=False), run(rows)
    torch.testing.assert_close(without["advantages"], whole["inter"])
    torch.testing.assert_close(without["intra"], whole["intra"])  # before the sum: there, but not added
    assert rlx.create("advantage", "hbpo", use_intra=False).requires == frozenset()


def test_the_method_pays_by_budget_and_compares_what_was_paid():
    host = rlx.HostProfile("any", signals=frozenset({"logp_old", "budget"}))
    parts = rlx.build({"method": {"name": "hbpo", "max_length": 8, "overrun_coef": 0.0}}, host)
    batch = rlx.RolloutBatch(
        {
            "rewards": torch.tensor([1.0, 1.0, 0.0, 1.0], dtype=torch.float64),
            "group": torch.zeros(4, dtype=torch.int64),
            "budget": torch.tensor([2, 2, 4, 4]),
            "response_mask": torch.arange(4) < torch.tensor([[2], [4], [1], [4]]),
            "keep": torch.ones(4, dtype=torch.bool),
            "logp_old": torch.zeros(4, 4, dtype=torch.float64),
        }
    )
    ready = rlx.prepare(parts, batch).batch
    small, large = math.cos(math.pi / 8), math.cos(math.pi / 4)
    assert ready.rewards.tolist() == pytest.approx([small, large, 0, large])
    want = (large - small) / 2 + ready.inter_budget[0]
    assert ready.advantages[0, :2].tolist() == pytest.approx([float(want)] * 2)
    with pytest.raises(rlx.ConfigError, match="needs the signal 'budget'"):
        rlx.build({"method": "hbpo"}, rlx.HostProfile("any", signals=frozenset({"logp_old"})))
