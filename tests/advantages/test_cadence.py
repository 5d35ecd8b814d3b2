"""CADENCE's advantage: centred rewards and a bonus for short correct rollouts."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import rlx_plugins as rlx
from rlx_plugins.testing import evaluate

ROW = st.tuples(
    st.integers(0, 1), st.sampled_from([0.0, 0.3, 1.0, math.nan]), st.sampled_from([0, 1]), st.integers(0, 9)
)  # group, reward, correct, length


def run(rows, **params):
    group, rewards, correct, lengths = (list(c) for c in zip(*rows, strict=True))
    mask = (torch.arange(max(1, max(lengths))) < torch.tensor(lengths)[:, None]).double()
    inputs = {"rewards": rewards, "correct": correct, "group": group, "response_mask": mask}
    return evaluate("advantage", "cadence", inputs, params), mask


@settings(max_examples=80, deadline=None)
@given(st.lists(ROW, min_size=1, max_size=10), st.sampled_from([0.0, 0.5, 0.9]))
def test_advantages_are_what_the_equations_say(rows, eta):
    out, mask = run(rows, eta=eta, lambda_r=2.0, lambda_lap=0.5)
    for i, (g, r, c, n) in enumerate(rows):
        pool = [row for row in rows if row[0] == g and row[3] > 0 and not math.isnan(row[1])]
        base = bonus = 0.0
        if rows[i] in pool:
            base = r - sum(row[1] for row in pool) / len(pool)
            lengths = [row[3] for row in pool if row[2]]
            if c:
                typical = sum(lengths) / len(lengths)
                bonus = 1 + eta * min(max((typical - n) / typical, -1), 1)
        assert float(out["baseline"][i]) == pytest.approx(base, abs=1e-9)
        assert float(out["brevity"][i]) == pytest.approx(bonus)
        want = (2 * base + 0.5 * bonus) * mask[i]
        torch.testing.assert_close(out["advantage"][i], want)


def test_the_bonus_of_correct_rows_falls_with_length_and_averages_one():
    out, _ = run([(0, 1.0, 1, n) for n in (2, 3, 4)] + [(0, 0.0, 0, 1)])
    brevity = out["brevity"].tolist()
    assert brevity[0] > brevity[1] > brevity[2] and brevity[3] == 0
    assert sum(brevity[:3]) == pytest.approx(3)


def test_a_constant_on_all_rewards_of_a_group_changes_nothing():
    rows = [(0, 1.0, 1, 2), (0, 0.3, 0, 4)]
    moved = [(g, r + 5, c, n) for g, r, c, n in rows]
    torch.testing.assert_close(run(rows)[0]["advantage"], run(moved)[0]["advantage"])


def test_a_group_of_one_has_only_its_bonus():
    assert run([(0, 1.0, 1, 2)])[0]["advantage"].tolist() == [[0.5, 0.5]]
    assert run([(0, 1.0, 0, 2)])[0]["advantage"].tolist() == [[0, 0]]


def test_partial_credit_of_the_reward_is_not_taken_for_correctness():
    host = rlx.HostProfile("any", signals=frozenset({"logp_old", "predicted", "target"}))
    parts = rlx.build({"reward": {"name": "cadence", "max_partial": 0.9}, "advantage": "cadence"}, host)
    batch = rlx.RolloutBatch(
        {
            "rewards": torch.tensor([1.0, 0.0], dtype=torch.float64),
            "group": torch.tensor([0, 0]),
            "predicted": torch.tensor([10.0, 10.0]),
            "target": torch.tensor([10.0, 10.0]),
            "response_mask": torch.ones(2, 1, dtype=torch.bool),
            "keep": torch.ones(2, dtype=torch.bool),
            "logp_old": torch.zeros(2, 1),
        }
    )
    ready = rlx.prepare(parts, batch).batch
    assert ready.rewards.tolist() == [1, 0.9] and ready.brevity.tolist() == [1, 0]
    assert ready.advantages[:, 0].tolist() == pytest.approx([0.55, -0.05])


def test_a_slope_that_could_punish_a_correct_row_is_refused():
    with pytest.raises(rlx.ConfigError, match="length_slope: must be < 1"):
        rlx.create("advantage", "cadence", length_slope=1.0)
