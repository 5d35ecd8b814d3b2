"""RTMC: pooled Monte Carlo values at equal states, first visits, shrinkage, and signatures of turns."""

import pytest
import torch

from rlx_plugins import ConfigError, RolloutBatch, Segment, create
from rlx_plugins.advantages._signatures import turn_signatures
from rlx_plugins.core.trajectory import Rollout
from rlx_plugins.testing import evaluate

ROWS = {
    "rewards": [1.0, 0.0, 1.0],
    "group": [0, 0, 0],
    "state_ids": [["s0", "s1", "s2"], ["s0", "s1"], ["s0", "s3"]],
    "action_ids": [["a", "b", "c"], ["a", "d"], ["e", "c"]],
}


def steps(params=None, **changes):
    return evaluate("advantage", "rtmc", {**ROWS, **changes}, params)["step_advantages"]


def test_without_shared_states_it_is_two_thirds_of_the_distance_from_the_mean():
    apart = {"state_ids": [["a", "b", "c"], ["d", "e"], ["f", "g"]]}
    got = steps({"gamma": 1.0}, **apart)
    assert [row[0] for row in got] == pytest.approx([2 / 3 * (r - 2 / 3) for r in ROWS["rewards"]])
    assert all(x == 0 for row in steps({"gamma": 1.0, "n_prior": 0}, **apart) for x in row), "no signal, not noise"


def test_normalising_does_not_blow_up_the_rounding_of_equal_rewards():
    batch = RolloutBatch(
        {
            "rewards": torch.full((3,), 0.9),  # 2/3 of a reward of 0.9 and 1/3 of it are not 0.9 in float32
            "group": torch.zeros(3, dtype=torch.int64),
            "response_mask": torch.ones(3, 1, dtype=torch.bool),
            "turn_ids": torch.zeros(3, 1, dtype=torch.int64),
            "state_ids": [["x"], ["x"], ["y"]],
            "action_ids": [["a"], ["b"], ["a"]],
        }
    )
    advantages = create("advantage", "rtmc", normalize=True, discount=1.0)(batch)["advantages"]
    assert advantages.abs().max() < 1e-6 and advantages.dtype == torch.float32


def test_without_a_prior_the_first_visits_of_a_state_sum_to_zero():
    got = steps({"n_prior": 0})
    assert got[0][0] + got[1][0] + got[2][0] == pytest.approx(0)
    assert got[0][1] + got[1][1] == pytest.approx(0)


def test_a_fork_at_a_shared_root_gives_winner_and_loser_opposite_advantages():
    fork = {"rewards": [1.0, 0.0], "group": [3, 3], "state_ids": [["r"], ["r"]], "action_ids": [["a"], ["b"]]}
    assert steps({"gamma": 1.0}, **fork) == [[pytest.approx(0.5)], [pytest.approx(-0.5)]]


def test_the_value_of_a_rare_state_is_drawn_to_the_groups_mean():
    fork = {"rewards": [1.0, 0.0, 0.0], "state_ids": [["r"], ["r"], ["q"]], "action_ids": [["a"], ["b"], ["c"]]}
    mean, value = 1 / 3, 0.5
    assert steps({"n_prior": 6.0}, **fork)[0][0] == pytest.approx(1 - (2 * value + 6 * mean) / 8)


def test_only_the_first_visit_of_a_pair_counts_but_every_visit_is_credited():
    loop = {"rewards": [1.0, 0.0], "group": [0, 0], "state_ids": [["s", "s"], ["s"]], "action_ids": [["a", "a"], ["a"]]}
    got = steps({"gamma": 0.5, "n_prior": 0}, **loop)
    assert got == [[0, 0], [0]]  # one pair: Q = V
    fork = {**loop, "action_ids": [["a", "a"], ["b"]]}
    assert steps({"gamma": 0.5, "n_prior": 0}, **fork) == [
        [0.25, 0.25],
        [-0.25],
    ]  # Q(a) = 0.5, the first visit's return


def test_relabelled_signatures_change_nothing_and_are_not_pooled_across_groups():
    names = {"s0": 9, "s1": ["x", [1]], "s2": "s1", "s3": "s0"}
    relabelled = [[names[s] for s in row] for row in ROWS["state_ids"]]
    assert steps(state_ids=relabelled) == steps()
    two = steps(group=[0, 0, 8])
    assert two[:2] == steps(**{k: v[:2] for k, v in ROWS.items()})


def test_equal_rewards_without_discount_give_nothing():
    assert all(abs(x) < 1e-12 for row in steps({"gamma": 1.0}, rewards=[0.3] * 3) for x in row)


def test_step_rewards_are_added_where_they_fall():
    plain = {
        "rewards": [0.0, 0.0],
        "group": [0, 0],
        "state_ids": [["r", "t"], ["r", "u"]],
        "action_ids": [["a", "b"]] * 2,
    }
    got = steps(
        {"gamma": 0.5, "n_prior": 0}, **{**plain, "action_ids": [["a", "b"], ["c", "b"]]}, step_rewards=[[0, 1], [1]]
    )
    assert got[0][0] == pytest.approx((0.5 - 1) / 2) and got[1][0] == pytest.approx((1 - 0.5) / 2)


def test_normalisation_divides_by_the_groups_spread_and_leaves_the_mean():
    plain, scaled = steps(), steps({"normalize": True})
    flat = torch.tensor([x for row in plain for x in row])
    got = torch.tensor([x for row in scaled for x in row])
    torch.testing.assert_close(got, flat / flat.std(correction=0))


def test_a_row_without_steps_counts_in_the_mean_only():
    more = {k: [*v, w] for (k, v), w in zip(ROWS.items(), (0.0, 0, [], []), strict=True)}
    got = steps({"gamma": 1.0}, **more)
    assert got[3] == [] and got[2][1] == pytest.approx(1 - (1 + 2 * 0.5) / 3)


def test_a_group_of_one_is_zero_in_the_library_and_the_formulas_discount_raw():
    alone = {"rewards": [0.6], "group": [0], "state_ids": [["a", "b"]], "action_ids": [["x", "y"]]}
    assert steps({"gamma": 0.5}, **alone)[0] == pytest.approx([2 / 3 * 0.6 * (0.5 - 1), 0])
    assert steps({"singleton": "zero"}, **alone)[0] == [0, 0]


def test_turn_signatures_compare_what_was_done_in_any_order():
    def played(*turns):
        segments = []
        for n, (own, result) in enumerate(turns):
            segments += [Segment(own, "policy", turn=n), Segment(result, "tool", turn=n)]
        return Rollout("p", "g", 0, [0], segments=[*segments, Segment([9], "policy", turn=len(turns))])

    (states, actions), (other, _) = (
        turn_signatures(played(*t)) for t in ([([1], [5]), ([2], [6])], [([2], [6]), ([1], [5])])
    )
    assert actions == [(1,), (2,), (9,)]
    assert states[0] == other[0] and states[1] != other[1] and states[2] == other[2]
    changed, _ = turn_signatures(played(([1], [7]), ([2], [6])))
    assert changed[2] != states[2], "another tool output is another state"


def test_a_signature_function_is_named_by_its_place_and_checked_at_once():
    create("advantage", "rtmc", signatures="rlx_plugins.advantages._signatures:turn_signatures")
    for wrong in ("rlx_plugins.nowhere:f", "rlx_plugins:nothing", "turn"):
        with pytest.raises(ConfigError, match="rtmc.signatures"):
            create("advantage", "rtmc", signatures=wrong)
