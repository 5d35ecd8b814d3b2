"""CIPO: the difference to a twin that chose otherwise."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlx_plugins import HostProfile, RolloutBatch, build, create
from rlx_plugins.testing import evaluate

NAN = math.nan
OUTCOME = st.sampled_from([0.0, 0.5, 1.0, NAN])
ROWS = st.lists(st.tuples(st.integers(0, 2), OUTCOME, st.one_of(OUTCOME, st.just(9.0))), min_size=1, max_size=10)


def run(rows, **params):
    """[B,2] advantages, the second token the decision, and d."""
    group, rewards, twins = (list(c) for c in zip(*rows, strict=True))
    inputs = {
        "rewards": rewards,
        "rewards_cf": twins,
        "group": group,
        "response_mask": [[1, 1]] * len(rows),
        "decision_mask": [[0, 1]] * len(rows),
    }
    out = evaluate("advantage", "cipo", inputs, params)
    return out["advantages"], out["paired_difference"]


def grpo(rows, supplement=None, **params):
    rewards = torch.tensor([r for _, r, _ in rows], dtype=torch.float64)
    rewards = rewards if supplement is None else rewards + supplement
    inputs = {"rewards": rewards, "group": [g for g, _, _ in rows]}
    return evaluate("advantage", "grpo", inputs, {"singleton": "raw", **params})["advantages"]


@settings(max_examples=60, deadline=None)
@given(ROWS, st.sampled_from([0.0, 0.5, 2.0]), st.sampled_from([0.3, 1.0]))
def test_advantages_are_what_the_equations_say(rows, lam, bound):
    got, d = run(rows, lam=lam, bound=bound)
    want = [0.0 if math.isnan(r) or math.isnan(twin) else min(max(r - twin, -bound), bound) for _, r, twin in rows]
    assert d.tolist() == pytest.approx(want)
    torch.testing.assert_close(got, grpo(rows, lam * d)[:, None].expand(-1, 2))
    got, _ = run(rows, lam=lam, bound=bound, apply_to="decision")
    torch.testing.assert_close(got[:, 0], grpo(rows))
    torch.testing.assert_close(got[:, 1], grpo(rows) + lam * d)


def test_a_group_of_equal_rewards_gets_a_signal_from_its_twins():
    rows = [(0, 1.0, 0.0), (0, 1.0, 1.0)]
    assert run(rows)[0][:, 0].tolist() == pytest.approx([math.sqrt(0.5), -math.sqrt(0.5)], rel=1e-5)
    assert run(rows, apply_to="decision")[0].tolist() == [[0, 0.5], [0, 0]]


def test_a_better_twin_never_raises_the_rows_advantage():
    for apply_to in ("all", "decision"):
        found = [
            float(run([(0, 0.5, twin), (0, 1.0, 0.2), (0, 0.0, NAN)], apply_to=apply_to)[0][0, 1])
            for twin in (-1.0, 0.0, 0.4, 0.5, 1.0, 3.0)
        ]
        assert found == sorted(found, reverse=True) and found[0] > found[-1]


def test_an_infinite_outcome_is_no_outcome():
    assert run([(0, 1.0, math.inf), (0, 0.0, -math.inf)])[1].tolist() == [0, 0]


def test_a_group_of_one_has_advantage_zero_in_the_library_and_its_raw_reward_on_request():
    batch = RolloutBatch(
        {
            "rewards": torch.tensor([1.0]),
            "twin_rewards": torch.tensor([0.0]),
            "group": torch.tensor([0]),
            "response_mask": torch.ones(1, 1, dtype=torch.bool),
        }
    )
    assert create("advantage", "cipo")(batch)["advantages"].tolist() == [[0]]
    raw = create("advantage", "cipo", base={"name": "grpo", "singleton": "raw"})(batch)["advantages"]
    assert float(raw) == pytest.approx(1.5, rel=1e-5)


def test_the_decision_may_come_as_one_list_per_row_and_only_where_it_is_asked_for():
    batch = RolloutBatch(
        {
            "rewards": torch.tensor([1.0, 1.0]),
            "twin_rewards": torch.tensor([0.0, 1.0]),
            "group": torch.tensor([0, 0]),
            "response_mask": torch.tensor([[True, True, False]] * 2),
            "decision_mask": [[0, 1], None],
        }
    )
    got = create("advantage", "cipo", apply_to="decision")(batch)["advantages"]
    assert got.tolist() == [[0, 0.5, 0], [0, 0, 0]]
    host = HostProfile("any", signals=frozenset({"logp_old", "twin_rewards"}))
    build({"advantage": "cipo"}, host)
    with pytest.raises(ValueError, match="cipo needs the signal 'decision_mask'"):
        build({"advantage": {"name": "cipo", "apply_to": "decision"}}, host)
