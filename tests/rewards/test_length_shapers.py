"""ALP and LEAD: rewards that depend on response length relative to the prompt's own group."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlx_plugins import ConfigError, RolloutBatch, create

NAN = math.nan


def batch(rewards, lengths, group=None, **columns):
    """Rows of these lengths."""
    lengths = torch.tensor(lengths)
    return RolloutBatch(
        {
            "rewards": torch.tensor(rewards, dtype=torch.float64),
            "group": torch.zeros(len(lengths), dtype=torch.int64) if group is None else torch.tensor(group),
            "response_mask": torch.arange(max(1, int(lengths.max()))) < lengths[:, None],
            **columns,
        }
    )


def shape(name, correct, lengths, group=None, **params):
    return create("reward", name, **params)(batch(correct, lengths, group))


ROW = st.tuples(st.integers(0, 2), st.sampled_from([0.0, 1.0, NAN]), st.integers(0, 40))  # group, correct, length
ROWS = st.lists(ROW, min_size=1, max_size=15)


# ---- alp -------------------------------------------------------------------------------------------------------------


@settings(max_examples=50, deadline=None)
@given(ROWS)
def test_alp_takes_length_times_the_groups_solve_rate_from_correctness(rows):
    group, correct, lengths = zip(*rows, strict=True)
    got = shape("alp", correct, lengths, group, penalty_coef=0.01)
    for i, (g, c, n) in enumerate(rows):
        judged = [k for h, k, _ in rows if h == g and not math.isnan(k)]
        coefficient = max(sum(judged) / len(judged), 1 / len(judged)) if judged else 0
        assert float(got["length_coefficient"][i]) == pytest.approx(coefficient)
        assert float(got["length_penalty"][i]) == pytest.approx(0.01 * n * coefficient)
        assert float(got["rewards"][i]) == pytest.approx(c - 0.01 * n * coefficient, nan_ok=True)


def test_nobody_solving_it_leaves_a_small_pull_to_short_answers_or_none():
    assert shape("alp", [0.0, 0.0], [4, 8], penalty_coef=0.1)["rewards"].tolist() == pytest.approx([-0.2, -0.4])
    assert shape("alp", [0.0, 0.0], [4, 8], penalty_coef=0.1, floor=0.0)["rewards"].tolist() == [0, 0]


def test_a_graded_answer_counts_as_solved_above_the_threshold():
    assert shape("alp", [0.5, 0.6], [1, 1], penalty_coef=0.0)["rewards"].tolist() == [0, 1]
    assert shape("alp", [0.5, 0.6], [1, 1], penalty_coef=0.0, success_threshold=0.4)["rewards"].tolist() == [1, 1]


def test_a_column_of_correctness_comes_before_the_rewards():
    rows = batch([0.0, 0.0], [1, 1], correct=torch.tensor([1.0, 0.0], dtype=torch.float64))
    assert create("reward", "alp", penalty_coef=0.0)(rows)["rewards"].tolist() == [1, 0]


def test_a_length_unit_makes_the_coefficient_dimensionless():
    a = shape("alp", [1.0, 0.0], [4, 8], penalty_coef=0.5, length_unit=8)["rewards"]
    assert a.tolist() == pytest.approx([1 - 0.125, -0.25])


def test_half_precision_rewards_do_not_swallow_the_penalty():
    rows = batch([1.0, 1.0], [1, 3])
    got = create("reward", "alp", penalty_coef=1e-4)(rows.with_columns(rewards=rows.rewards.bfloat16()))
    assert got["rewards"].tolist() == pytest.approx([1 - 1e-4, 1 - 3e-4], abs=1e-7)


def test_a_negative_floor_is_refused():
    with pytest.raises(ConfigError, match="reward alp.floor: must be >= 0"):
        create("reward", "alp", floor=-0.1)


# ---- lead ------------------------------------------------------------------------------------------------------------

WIDE = {"min_target": 1, "max_target": 1000}


@pytest.mark.parametrize("mode", ["max_sym", "max_asym", "upper_only"])
@settings(max_examples=40, deadline=None)
@given(rows=ROWS)
def test_efficiency_is_bounded_and_scale_free(mode, rows):
    group, correct, lengths = zip(*rows, strict=True)
    bounds = {"min_target": 5, "max_target": 30, "short_guard": 3}
    got = shape("lead", correct, lengths, group, mode=mode, **bounds)
    efficiency = got["reward_components"][:, 1]
    assert (efficiency.nan_to_num().abs() <= 1).all()
    assert ((got["target_length"] >= 5) & (got["target_length"] <= 30)).all()
    twice = {name: 2 * value for name, value in bounds.items()}
    doubled = shape("lead", correct, [2 * n for n in lengths], group, mode=mode, **twice)
    torch.testing.assert_close(doubled["reward_components"][:, 1], efficiency, equal_nan=True)


@pytest.mark.parametrize(
    ("aggregator", "target"), [("mean_correct", 14), ("min_correct", 4), ("median_correct", 8), ("mean_all", 15.5)]
)
def test_the_target_is_a_statistic_of_the_groups_own_lengths(aggregator, target):
    correct, lengths = [1.0, 1.0, 1.0, 0.0, NAN], [4, 8, 30, 20, 99]
    got = shape("lead", correct, lengths, aggregator=aggregator, **WIDE)
    assert got["target_length"].tolist() == [target] * 5


def test_the_symmetric_efficiency_is_one_at_the_target_and_falls_off_alike_on_both_sides():
    lengths = [10, 5, 15, 20, 30, 99, 0]
    got = shape("lead", [1.0] + [0.0] * 6, lengths, **WIDE)["reward_components"][:, 1]
    assert got.tolist() == pytest.approx([1, 0.5, 0.5, 0, -1, -1, 0])


def test_without_a_correct_row_the_target_is_the_upper_bound():
    got = shape("lead", [0.0, 0.0], [9, 9], min_target=1, max_target=50)
    assert got["target_length"].tolist() == [50, 50]


def test_the_target_is_clamped_between_its_bounds():
    correct, group = [1.0, 1.0], [0, 1]
    assert shape("lead", correct, [4, 40], group, min_target=10, max_target=20)["target_length"].tolist() == [10, 20]


def test_the_asymmetric_mode_rewards_short_correct_answers_and_punishes_long_wrong_ones():
    correct, lengths = [1.0, 1.0, 1.0, 0.0, 0.0], [2, 6, 22, 4, 15]  # target 10
    got = shape("lead", correct, lengths, mode="max_asym", short_guard=3, **WIDE)["reward_components"][:, 1]
    assert got.tolist() == pytest.approx([0, 0.4, 0, 0, -0.5])


def test_the_one_sided_mode_punishes_length_in_right_and_wrong_answers():
    got = shape("lead", [1.0, 0.0, 0.0], [10, 5, 15], mode="upper_only", **WIDE)["reward_components"][:, 1]
    assert got.tolist() == pytest.approx([0, 0, -0.5])


def test_at_full_size_the_defaults_give_the_published_targets():
    got = shape("lead", [1.0, 1.0, 0.0, 0.0, 0.0, 0.0], [1200, 2400, 600, 3000, 9000, 500], [0, 0, 0, 0, 1, 1])
    assert got["target_length"].tolist() == [1800] * 4 + [8000] * 2
    want = [0.666667, 0.666667, 0.333333, 0.333333, 0.875, 0.0625]
    assert got["reward_components"][:, 1].tolist() == pytest.approx(want, abs=1e-6)


def test_an_unscorable_row_has_no_components():
    got = shape("lead", [1.0, NAN], [4, 4], **WIDE)
    assert got["reward_components"][0].tolist() == [1, 1] and got["reward_components"][1].isnan().all()
    assert got["component_names"] == ("correct", "efficiency")


def test_rewards_stay_correctness_unless_a_weighted_sum_is_asked_for():
    assert "rewards" not in shape("lead", [1.0, 0.0], [4, 2], **WIDE)
    got = shape("lead", [1.0, 0.0], [4, 2], sum_weights=(1.0, 0.5), **WIDE)
    assert got["rewards"].tolist() == pytest.approx([1.5, 0.25])


def test_bounds_in_the_wrong_order_are_refused():
    with pytest.raises(ConfigError, match="reward lead.min_target: 20 exceeds max_target 10"):
        create("reward", "lead", min_target=20, max_target=10)


def test_alp_as_a_component_leaves_rewards_alone_and_adds_its_cost_by_name():
    mask = torch.arange(4) < torch.tensor([[4], [2], [1], [3]])
    batch = RolloutBatch(
        {
            "rewards": torch.tensor([1.0, 0.0, 1.0, torch.nan], dtype=torch.float64),
            "reward_components": torch.tensor([[1.0, 0.0], [0.0, 0.0], [1.0, 0.0], [torch.nan, torch.nan]]).double(),
            "component_names": ("accuracy", "format"),
            "group": torch.zeros(4, dtype=torch.int64),
            "response_mask": mask,
        }
    )
    out = create("reward", "alp", penalty_coef=0.3, output="component")(batch)
    assert "rewards" not in out and out["component_names"] == ("accuracy", "format", "alp")
    assert out["reward_components"][:3, 2].tolist() == pytest.approx([-0.3 * n * 2 / 3 for n in (4, 2, 1)])
    assert torch.isnan(out["reward_components"][3, 2])
