"""LEAD's advantage: weights that follow training; and the method that pairs it with its reward."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlx_plugins import ConfigError, DataError, HostProfile, RolloutBatch, build, create, prepare

HOST = HostProfile("table", signals=frozenset({"logp_old"}))
GROUP = torch.tensor([0, 0, 1, 1])
MASK = torch.tensor([[1, 1, 0], [1, 0, 0], [1, 1, 1], [1, 1, 0]]).bool()


def batch(components, group=GROUP, mask=MASK, **columns):
    components = torch.as_tensor(components, dtype=torch.float64)
    rewards = torch.where(components.isnan().any(1), torch.nan, components.sum(1))
    return RolloutBatch(
        {"reward_components": components, "rewards": rewards, "group": group, "response_mask": mask, **columns}
    )


MIXED = [[1, 0.8], [0, -0.3], [1, 0.5], [1, -0.2]]


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.floats(-1, 1)), min_size=4, max_size=4), st.sampled_from([0.0, 0.3, 0.9]))
def test_the_weights_sum_to_one_and_correctness_keeps_its_floor(components, floor):
    part = create("advantage", "lead", min_correct_weight=floor, decay=0.0)
    w_correct, w_efficiency = part(batch(components))["lead_weights"]
    assert w_correct + w_efficiency == pytest.approx(1) and w_correct >= floor


def test_a_static_weight_of_one_without_whitening_is_grpo_on_correctness():
    part = create("advantage", "lead", static_correct_weight=1.0, whiten=False, min_correct_weight=0.3)
    correct = batch(MIXED).with_columns(rewards=torch.tensor([1.0, 0, 1, 1], dtype=torch.float64))
    want = create("advantage", "grpo")(correct)["advantages"]
    torch.testing.assert_close(part(batch(MIXED))["advantages"], want, rtol=0, atol=1e-12)
    assert part.weights == [1.0, 0.0]


def test_the_whitened_mix_has_mean_zero_and_unit_variance_over_the_tokens():
    a = create("advantage", "lead")(batch(MIXED))["advantages"][MASK]
    assert float(a.mean()) == pytest.approx(0, abs=1e-6)
    assert float(a.var()) == pytest.approx(1, abs=1e-6)


def test_one_rows_tokens_have_no_spread_and_whiten_to_zero():
    rows = batch(MIXED[:2], torch.tensor([0, 0]), torch.tensor([[1, 1], [0, 0]]).bool())
    assert create("advantage", "lead", whiten=False)(rows)["advantages"][0, 0] > 0.5
    assert create("advantage", "lead")(rows)["advantages"].abs().max() < 1e-9


def test_over_equal_steps_the_weights_converge_to_the_target():
    part = create("advantage", "lead", decay=0.5)
    for _ in range(60):
        columns = part(batch(MIXED))
    assert part.weights == pytest.approx(columns["lead_target"])


def test_the_floor_is_applied_and_not_stored():
    part = create("advantage", "lead", min_correct_weight=0.9)
    assert part(batch(MIXED))["lead_weights"][0] == 0.9
    assert part.weights[0] == pytest.approx(0.4945004, abs=1e-6)


def test_with_nothing_correct_the_target_is_correctness_alone():
    assert create("advantage", "lead")(batch([[0, 0.5]] * 4))["lead_target"] == pytest.approx((1, 0), abs=1e-6)


def test_with_everything_correct_the_weight_moves_to_efficiency_down_to_the_floor():
    part = create("advantage", "lead", decay=0.0)
    columns = part(batch([[1, 0.8], [1, -0.3], [1, 0.5], [1, -0.2]]))
    assert columns["lead_target"] == pytest.approx((0, 1), abs=1e-6)
    assert columns["lead_weights"] == pytest.approx((0.3, 0.7))


def test_with_no_room_left_in_either_the_state_decays():
    part = create("advantage", "lead", decay=0.8)
    assert part(batch([[1, 1.0]] * 4))["lead_target"] == (0, 0)
    assert part.weights == pytest.approx([0.4, 0.4])


def test_efficiency_statistics_see_correct_rows_only_but_its_score_sees_all():
    part = create("advantage", "lead", static_correct_weight=0.0, whiten=False)
    other = [[1, 0.8], [0, 0.9], [1, 0.5], [1, -0.2]]
    targets = [create("advantage", "lead")(batch(rows))["lead_target"] for rows in (MIXED, other)]
    assert targets[0] == pytest.approx(targets[1])
    assert part(batch(other))["advantages"][:2, 0].tolist() == pytest.approx([-0.707, 0.707], abs=1e-3)


def test_a_group_of_one_and_a_row_without_tokens_have_advantage_zero_before_whitening():
    mask = torch.tensor([[1, 1], [0, 0], [1, 1], [1, 0]]).bool()
    rows = batch(MIXED, torch.tensor([0, 0, 1, 2]), mask)
    got = create("advantage", "lead", whiten=False)(rows)["advantages"]
    assert got[0, 0] > 0 and got[1:].tolist() == [[0, 0]] * 3


def test_an_unscorable_row_leaves_weights_and_whitening_to_the_others():
    rows = batch([*MIXED, [math.nan, math.nan]], torch.tensor([0, 0, 1, 1, 1]), torch.cat([MASK, MASK[:1]]))
    part, other = create("advantage", "lead"), create("advantage", "lead")
    got = part(rows)["advantages"]
    torch.testing.assert_close(got[:4], other(batch(MIXED))["advantages"])
    assert (got[4] == 0).all() and part.weights == other.weights


def test_components_are_found_by_name():
    swapped = batch([row[::-1] for row in MIXED], component_names=("efficiency", "correct"))
    got = create("advantage", "lead")(swapped)["advantages"]
    torch.testing.assert_close(got, create("advantage", "lead")(batch(MIXED))["advantages"])


def test_components_of_other_names_are_refused():
    with pytest.raises(DataError, match="advantage lead reads the reward components .* named .'accuracy', 'brevity'"):
        create("advantage", "lead")(batch(MIXED, component_names=("accuracy", "brevity")))


def test_a_restored_part_goes_on_as_if_never_stopped():
    part, resumed = create("advantage", "lead"), create("advantage", "lead")
    part(batch(MIXED))
    resumed.load_state_dict(part.state_dict())
    assert torch.equal(resumed(batch(MIXED))["advantages"], part(batch(MIXED))["advantages"])
    assert resumed.weights == part.weights


# ---- the method ------------------------------------------------------------------------------------------------------


def test_the_method_is_the_reward_and_the_advantage_together():
    parts = build({"method": {"name": "lead", "min_target": 1, "max_target": 4, "decay": 0.5}}, HOST)
    assert (parts.one("reward").max_target, parts.one("advantage").decay) == (4, 0.5)
    rows = RolloutBatch(
        {
            "rewards": torch.tensor([1.0, 1.0, 0.0, 1.0], dtype=torch.float64),
            "group": GROUP,
            "response_mask": MASK,
            "keep": torch.ones(4, dtype=torch.bool),
        }
    )
    got = prepare(parts, rows).batch
    assert got.target_length.tolist() == [1.5, 1.5, 2, 2]
    assert got.reward_components[:, 1].tolist() == pytest.approx([2 / 3, 2 / 3, 0.5, 1])
    assert got.advantages[3, 0] > 0 > got.advantages[2, 0]


def test_an_explicit_key_wins_over_the_method():
    parts = build({"method": "lead", "advantage": "dvao"}, HOST)
    assert (parts.one("reward").name, parts.one("advantage").name) == ("lead", "dvao")


def test_a_wrong_parameter_of_the_method_is_refused_by_the_part_it_belongs_to():
    with pytest.raises(ConfigError, match="reward lead.mode: expected one of"):
        build({"method": {"name": "lead", "mode": "symmetric"}}, HOST)
