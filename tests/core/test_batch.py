"""The table of columns, and packing rollouts into it."""

import math

import pytest
import torch

import rlx_plugins as rlx
from rlx_plugins.core.batch import RolloutBatch
from rlx_plugins.core.randomness import row_uniform


def batch(**columns):
    base = {
        "group": torch.tensor([0, 0, 1]),
        "response_mask": torch.tensor([[1, 1, 0], [1, 0, 0], [1, 1, 1]]).bool(),
        "rewards": torch.tensor([1.0, 0.0, 2.0]),
        "row_id": torch.tensor([3, 4, 5]),
        "prompt_key": ["a", "a", "b"],
        "component_names": ("x", "y", "z"),
    }
    return RolloutBatch({**base, **columns})


def test_columns_are_attributes_and_a_missing_one_is_named():
    b = batch()
    assert b.rewards is b["rewards"] and b.has("group") and not b.has("entropy")
    with pytest.raises(rlx.MissingSignal, match="no column 'entropy'; it has component_names, group"):
        b.entropy  # noqa: B018


def test_rows_select_tensors_and_lists_and_leave_batch_wide_values():
    picked = batch().rows(torch.tensor([2, 0]))
    assert picked.rewards.tolist() == [2.0, 1.0]
    assert picked.prompt_key == ["b", "a"]
    assert picked.component_names == ("x", "y", "z")
    assert batch().rows(torch.tensor([False, True, True])).group.tolist() == [0, 1]


def test_new_columns_make_a_new_batch_with_fresh_group_statistics():
    b = batch()
    assert len(b.groups) == 2
    other = b.with_columns(group=torch.tensor([0, 1, 2]))
    assert len(other.groups) == 3 and len(b.groups) == 2


def test_cut_shortens_the_token_columns_only():
    short = batch(logits=torch.zeros(3, 3, 7)).cut(2)
    assert short.response_mask.shape == (3, 2) and short.logits.shape == (3, 2, 7) and short.rewards.shape == (3,)


def test_spread_is_exactly_zero_where_masked_and_in_a_row_of_nan():
    out = batch().spread(torch.tensor([1.0, math.nan, 2.0]))
    assert out.tolist() == [[1, 1, 0], [0, 0, 0], [2, 2, 2]]


def test_uniform_depends_on_the_row_not_on_its_place():
    b = batch()
    order = torch.tensor([2, 0, 1])
    assert torch.equal(b.rows(order).uniform("x"), b.uniform("x")[order])
    assert not torch.equal(b.uniform("x"), b.uniform("y"))
    later = RolloutBatch(dict(b), step=1)
    assert not torch.equal(later.uniform("x"), b.uniform("x"))


def test_uniform_is_injectable():
    b = batch(**{"uniform:x": torch.tensor([0.1, 0.2, 0.3])})
    assert b.rows(torch.tensor([1])).uniform("x").tolist() == pytest.approx([0.2])


def test_row_uniform_is_uniform():
    u = row_uniform(torch.arange(200_000), 0, 0, "x")
    assert 0 <= u.min() and u.max() < 1
    counts = torch.histc(u, bins=20, min=0, max=1)
    chi2 = ((counts - 10_000) ** 2 / 10_000).sum()
    assert chi2 < 43.8  # 0.1 % point of chi-square with 19 degrees of freedom
    lagged = torch.corrcoef(torch.stack([u[1:], u[:-1]]))[0, 1]
    assert abs(lagged) < 0.01


def rollout(group, tokens, reward, **fields):
    (r,) = group.start(1)
    r.segments.append(rlx.Segment(tokens, logp=[-0.5] * len(tokens), version=2))
    r.reward = reward
    r.finish("eos")
    for name, value in fields.items():
        setattr(r, name, value)
    return r


def group(name):
    return rlx.Group(name, name[0], [1, 2])


def test_packing_keeps_groups_apart_even_for_the_same_prompt():
    first, second = group("a#0.0"), group("a#0.1")
    rollout(first, [5, 6], 1.0)
    rollout(second, [7], 0.0)
    packed = rlx.pack([first, second], version=3)
    assert packed.group.tolist() == [0, 1] and packed.prompt_key == ["a", "a"]
    assert packed.response_ids.tolist() == [[5, 6], [7, 0]]
    assert packed.response_mask.tolist() == [[True, True], [True, False]]
    assert packed.staleness.tolist() == [[1, 1], [1, 0]]
    assert math.isnan(packed.logp_rollout[1, 1])


def test_hint_tool_and_untrained_tokens_are_not_model_tokens_that_count():
    g = group("a")
    (r,) = g.start(1)
    r.segments += [
        rlx.Segment([1], source="hint"),
        rlx.Segment([2], trained=False),
        rlx.Segment([3], source="tool"),
        rlx.Segment([4], turn=1),
    ]
    r.reward = 1.0
    r.finish("eos")
    packed = rlx.pack([g])
    assert packed.response_mask.tolist() == [[False, False, False, True]]
    assert packed.hint_mask.tolist() == [[True, False, False, False]]
    assert packed.turn_ids.tolist() == [[-1, 0, -1, 1]]
    assert packed.helped.tolist() == [True]


def test_the_engines_likeliest_tokens_are_columns_where_a_segment_has_them():
    g = group("a")
    assert "rollout_top_ids" not in rlx.pack([g]) if rollout(g, [4], 0.0) else False
    (r,) = g.start(1)
    reported = torch.tensor([[5, 8], [6, 9]], dtype=torch.int32), torch.tensor([[-0.1, -2.5], [-0.2, -2.0]])
    r.segments += [rlx.Segment([1], "hint"), rlx.Segment([5, 6], top=reported)]
    r.reward = 1.0
    r.finish("eos")
    packed = rlx.pack([g])
    assert packed.rollout_top_ids.tolist() == [[[-1, -1]] * 3, [[-1, -1], [5, 8], [6, 9]]]
    assert packed.rollout_top_ids.dtype == torch.int32
    torch.testing.assert_close(packed.rollout_top_logp[1, 1:], reported[1])
    assert torch.isnan(packed.rollout_top_logp).sum() == 8


def test_imitated_hint_tokens_count_like_the_models_own_except_in_a_shared_prefix():
    g = group("a")
    (r,) = g.start(1)
    r.segments += [
        rlx.Segment([1], source="hint", imitated=True, trained=False),
        rlx.Segment([2], source="hint", imitated=True),
        rlx.Segment([3], logp=[-1.0]),
    ]
    r.reward = 1.0
    r.finish("eos")
    packed = rlx.pack([rlx.Group.from_plain(g.to_plain())])
    assert packed.response_mask.tolist() == [[False, True, True]]
    assert packed.hint_mask.tolist() == [[True, True, False]] and packed.turn_ids.tolist() == [[0, 0, 0]]
    assert torch.isnan(packed.logp_rollout).tolist() == [[True, True, False]]


def test_components_are_columns_by_name_and_nan_where_absent():
    g = group("a")
    rollout(g, [1], 1.0, components={"b": 0.5})
    rollout(g, [1], None, components={"a": 2.0})
    packed = rlx.pack([g])
    assert packed.component_names == ("a", "b")
    assert packed.reward_components[0, 1] == 0.5 and math.isnan(packed.reward_components[0, 0])
    assert math.isnan(packed.rewards[1])


def test_scalars_in_extras_become_columns_and_anything_else_a_list():
    g = group("a")
    rollout(g, [1], 1.0, extras={"prior": 0.25, "gains": [1.0, 2.0]})
    rollout(g, [1], 0.0)
    packed = rlx.pack([g])
    assert packed.prior[0] == 0.25 and math.isnan(packed.prior[1])
    assert packed.gains == [[1.0, 2.0], None]


def test_an_empty_response_still_has_a_row():
    g = group("a")
    rollout(g, [], 0.0)
    packed = rlx.pack([g])
    assert packed.response_mask.tolist() == [[False]]


def test_a_step_without_finished_rollouts_is_an_error():
    with pytest.raises(rlx.DataError, match="no rollout finished"):
        rlx.pack([group("a")])


@pytest.mark.parametrize(("rewards", "expected"), [("bfloat16", "float32"), ("float32", "float32"), ("float64",) * 2])
def test_weights_and_counts_are_never_made_in_half_precision(rewards, expected):
    b = batch(rewards=torch.ones(3, dtype=getattr(torch, rewards)))
    assert b.dtype == getattr(torch, expected)
