"""SD-GRPO: every role of a rollout compared by its own reward."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import rlx_plugins as rlx
from rlx_plugins.testing import evaluate

NAN = math.nan


def segments(segment_rewards, group=None, **params):
    """[B,S] advantages of rows that have one token of each role, and the token advantages."""
    count, width = len(segment_rewards), len(segment_rewards[0])
    inputs = {
        "group": [0] * count if group is None else group,
        "response_mask": [[1] * width] * count,
        "segment_ids": [list(range(width))] * count,
        "segment_rewards": segment_rewards,
    }
    out = evaluate("advantage", "sd_grpo", inputs, params)
    return out["segment_advantages"], out["advantages"]


def grpo(rewards, group, **params):
    params = {"eps": 1e-4, "singleton": "zero", **params}
    return evaluate("advantage", "grpo", {"rewards": rewards, "group": group}, params)["advantages"]


VALUE = st.one_of(st.integers(-4, 4).map(lambda k: k / 4), st.just(NAN), st.just(math.inf))
ROWS = st.lists(st.tuples(st.integers(0, 2), VALUE, VALUE, VALUE), min_size=1, max_size=10)
RULES = st.fixed_dictionaries(
    {"scale": st.sampled_from(["group", "none"]), "singleton": st.sampled_from(["zero", "raw"])}
)


@settings(max_examples=60, deadline=None)
@given(ROWS, RULES)
def test_each_segment_is_grpo_on_its_own_rewards(rows, rules):
    group, *columns = (list(c) for c in zip(*rows, strict=True))
    rewards = [list(r) for r in zip(*columns, strict=True)]
    values, tokens = segments(rewards, group, **rules)
    for s, column in enumerate(columns):
        torch.testing.assert_close(values[:, s], grpo(column, group, **rules), rtol=0, atol=1e-9)
    torch.testing.assert_close(tokens, values)


@pytest.mark.parametrize("share", [0.25, 1.0])
def test_the_blend_adds_the_z_score_of_the_whole_row(share):
    rewards, whole, group = [[1.0, 0.0], [0.0, NAN], [0.5, 1.0]], [0.0, 1.0, 0.5], [0, 0, 0]
    inputs = {
        "group": group,
        "response_mask": [[1, 1]] * 3,
        "segment_ids": [[0, 1]] * 3,
        "segment_rewards": rewards,
        "rewards": whole,
    }
    out = evaluate("advantage", "sd_grpo", inputs, {"holistic_weight": share})
    own, _ = segments(rewards)
    want = (1 - share) * own + share * grpo(whole, group)[:, None]
    torch.testing.assert_close(out["advantages"], want)


def test_a_component_belongs_to_the_segments_that_weigh_it_and_missing_ones_are_skipped():
    components = [[1.0, 2.0, NAN], [0.0, NAN, NAN], [3.0, 1.0, 5.0]]
    batch = batch_of(reward_components=torch.tensor(components, dtype=torch.float64))
    part = rlx.create("advantage", "sd_grpo", segment_weights=[[1, 0.5, 0], [0, 0, 2]])
    assert part.segment_rewards(batch).nan_to_num(-99).tolist() == [[2, -99], [0, -99], [3.5, 10]]


def test_weights_by_name_take_the_batchs_order_and_dynframes_are_the_default():
    components = torch.tensor([[1.0, 2.0, 4.0, 8.0]])
    names = ("answer", "format", "fps", "span")
    batch = batch_of(reward_components=components, component_names=names)
    assert rlx.create("advantage", "sd_grpo").segment_rewards(batch).tolist() == [[12, 3]]
    with pytest.raises(rlx.ConfigError, match=r"segment_weights\[0\]: the reward components are .*, the weights"):
        rlx.create("advantage", "sd_grpo").segment_rewards(batch.with_columns(component_names=("a", "b", "c", "d")))
    with pytest.raises(rlx.ConfigError, match="2 weights for 4 reward components"):
        rlx.create("advantage", "sd_grpo", segment_weights=[[1, 1]]).segment_rewards(batch)


# ---- where the tokens' roles come from ------------------------------------------------------------------------------

MASK = [[1, 1, 1, 0, 1, 1], [1, 1, 1, 1, 1, 0], [0, 0, 0, 0, 0, 0]]


def roles(count, boundary_mask, mask=MASK, **params):
    inputs = {"group": [0, 0, 0], "response_mask": mask, "boundary_mask": boundary_mask}
    inputs["segment_rewards"] = [[0.0] * count] * 3
    return evaluate("advantage", "sd_grpo", inputs, params)["segment_ids"].tolist()


def test_a_boundary_token_still_belongs_to_the_earlier_role_and_the_last_role_takes_the_rest():
    boundaries = [[1, 0, 1, 0, 1, 0], [0] * 6, [1] * 6]
    assert roles(3, boundaries) == [[0, 1, 1, -1, 2, 2], [0, 0, 0, 0, 0, -1], [-1] * 6]
    assert roles(2, boundaries)[0] == [0, 1, 1, -1, 1, 1]
    assert roles(3, boundaries, no_boundary="last")[1:] == [[2, 2, 2, 2, 2, -1], [-1] * 6]


def test_a_boundary_the_model_did_not_write_is_none():
    assert roles(2, [[0, 0, 0, 1, 0, 0], [0, 0, 0, 0, 0, 1], [0] * 6], no_boundary="last")[:2] == [
        [1, 1, 1, -1, 1, 1],
        [1, 1, 1, 1, 1, -1],
    ]


def test_a_boundary_mask_and_the_ids_it_implies_give_the_same_advantages():
    inputs = {"group": [0, 0, 0], "response_mask": MASK, "segment_rewards": [[1.0, 0.0], [0.0, 1.0], [0.5, 2.0]]}
    boundary = [[0, 1, 0, 0, 0, 0], [0, 0, 0, 1, 0, 0], [0] * 6]
    first = evaluate("advantage", "sd_grpo", {**inputs, "boundary_mask": boundary})
    second = evaluate("advantage", "sd_grpo", {**inputs, "segment_ids": first["segment_ids"]})
    torch.testing.assert_close(first["advantages"], second["advantages"])


def batch_of(**columns):
    return rlx.RolloutBatch({"response_mask": torch.tensor(MASK[:2]).bool(), "group": torch.tensor([0, 0]), **columns})


def test_a_marker_of_several_tokens_is_found_in_the_response():
    ids = torch.tensor([[7, 8, 7, 8, 8, 1], [8, 7, 1, 7, 8, 7]])
    part = rlx.create("advantage", "sd_grpo", boundary_tokens=[7, 8])
    assert part.token_roles(batch_of(response_ids=ids), 2).tolist() == [[0, 0, 1, -1, 1, 1], [0, 0, 0, 0, 0, -1]]
    part = rlx.create("advantage", "sd_grpo", boundary_tokens=[1] * 9)
    assert part.token_roles(batch_of(response_ids=ids), 2).max() == 0


def test_turns_are_roles_and_late_turns_share_the_last_one():
    turns = torch.tensor([[0, 0, 0, -1, 1, 1], [0, 1, 2, 3, 4, -1]])
    part = rlx.create("advantage", "sd_grpo", roles="turn_ids")
    assert part.token_roles(batch_of(turn_ids=turns), 3).tolist() == [[0, 0, 0, -1, 1, 1], [0, 1, 2, 2, 2, -1]]


def test_ids_may_come_as_one_list_per_row_and_a_token_without_a_role_has_no_credit():
    part = rlx.create("advantage", "sd_grpo", roles="role_ids", segment_weights=None)
    batch = batch_of(role_ids=[[0, -1, 1], [1, 1, 1, 0, 0, 9, 9]], segment_rewards=[[1.0, 0.0], [0.0, None]])
    assert part.token_roles(batch, 2).tolist() == [[0, -1, 1, -1, -1, -1], [1, 1, 1, 0, 0, -1]]
    assert (part(batch)["advantages"] != 0).tolist() == [[True] + [False] * 5, [False] * 3 + [True, True, False]]


def test_an_id_beyond_the_last_role_names_row_and_position():
    inputs = {"group": [0, 0, 0], "response_mask": MASK, "segment_rewards": [[0.0, 0.0]] * 3}
    ids = [[0] * 6, [0, 0, 1, 2, 0, 0], [0] * 6]
    with pytest.raises(rlx.DataError, match="row 1, response position 3: role id 2, but there are 2 roles"):
        evaluate("advantage", "sd_grpo", {**inputs, "segment_ids": ids})


# ---- configuration --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"segment_weights": [[1, -1]]}, "segment_weights"),
        ({"segment_weights": [[1, 0], [0, 0]]}, r"segment_weights\[1\]: at least one must be above 0"),
        ({"segment_weights": []}, "at least one role"),
        ({"boundary_tokens": [3], "roles": "turn_ids"}, "boundary_tokens"),
        ({"holistic_weight": 1.5}, "holistic_weight"),
    ],
)
def test_settings_that_can_mean_nothing_are_refused(params, message):
    with pytest.raises(rlx.ConfigError, match=message):
        rlx.create("advantage", "sd_grpo", **params)


def test_it_asks_the_host_for_the_columns_its_settings_read():
    create = rlx.create
    assert create("advantage", "sd_grpo").requires == {"reward_components", "component_names", "boundary_mask"}
    part = create("advantage", "sd_grpo", segment_weights=None, boundary_tokens=[5])
    assert part.requires == {"segment_rewards"} and part.credits == "segment_rewards"
    assert create("advantage", "sd_grpo", segment_weights=None, roles="turn_ids").requires == {
        "segment_rewards",
        "turn_ids",
    }


@pytest.mark.parametrize("twice", [("segment_ids", "boundary_mask"), ("segment_rewards", "reward_components")])
def test_the_function_form_refuses_two_of_a_kind_and_none(twice):
    one = {"segment_ids": [[0]], "boundary_mask": [[0]], "segment_rewards": [[1]], "reward_components": [[1]]}
    kept = {"segment_ids": [[0]], "segment_rewards": [[1]]} | {name: one[name] for name in twice}
    with pytest.raises(rlx.ConfigError, match="one of them"):
        evaluate("advantage", "sd_grpo", {"group": [0], "response_mask": [[1]], **kept})
    none = {name: value for name, value in kept.items() if name not in twice}
    with pytest.raises(rlx.ConfigError, match="one of them"):
        evaluate("advantage", "sd_grpo", {"group": [0], "response_mask": [[1]], **none})


def test_renaming_the_segments_together_with_their_rewards_changes_nothing():
    inputs = {"group": [0, 0], "response_mask": [[1, 1, 1], [1, 1, 0]]}
    one = {"segment_ids": [[0, 1, 2], [2, 0, -1]], "segment_rewards": [[1.0, 0.0, NAN], [0.0, 0.5, 2.0]]}
    other = {"segment_ids": [[2, 0, 1], [1, 2, -1]], "segment_rewards": [[0.0, NAN, 1.0], [0.5, 2.0, 0.0]]}
    got = [evaluate("advantage", "sd_grpo", {**inputs, **which})["advantages"] for which in (one, other)]
    torch.testing.assert_close(*got)
