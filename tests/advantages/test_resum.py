"""ReSum: subgroups with and without a summary, the format bonus, and counting summaries."""

import pytest
import torch

from rlx_plugins import ConfigError, Context, DataError, RolloutBatch, Segment, create
from rlx_plugins.core.trajectory import Group
from rlx_plugins.testing import evaluate

ROWS = {
    "rewards": [1.0, 0.0, 0.5, 0.0, 1.0, 0.2],
    "group": [4] * 6,
    "n_natural": [1, 0, 2, 0, 0, 0],
    "n_artificial": [0, 1, 1, 0, 0, 0],
}


def form(**changes):
    return evaluate("advantage", "resum", {**ROWS, **changes})


def test_each_subgroup_sums_to_zero_and_knows_nothing_of_the_other():
    out = form()
    assert float(out["advantages"][:3].sum()) == pytest.approx(0, abs=1e-12)
    assert float(out["advantages"][3:].sum()) == pytest.approx(0, abs=1e-12)
    other = form(rewards=[1.0, 0.0, 0.5, 9.0, -4.0, 0.7])
    assert torch.equal(out["advantages"][:3], other["advantages"][:3])
    assert not torch.equal(out["advantages"][3:], other["advantages"][3:])


def test_shifting_the_rewards_of_a_subgroup_changes_nothing():
    moved = form(rewards=[4.0, 3.0, 3.5, 0.0, 1.0, 0.2])
    torch.testing.assert_close(moved["advantages"], form()["advantages"])


def test_the_bonus_lies_between_that_of_an_injected_and_a_natural_summary():
    bonus = form()["total_reward"] - torch.tensor(ROWS["rewards"], dtype=torch.float64)
    assert bonus.tolist() == pytest.approx([0.2, 0.05, (2 * 0.2 + 0.05) / 3, 0, 0, 0])


def test_an_injected_branch_without_a_summary_stands_with_those_that_have_one():
    out = form(is_artificial_branch=[False, False, False, False, False, True])
    assert out["is_summary"].tolist() == [True, True, True, False, False, True]
    assert out["total_reward"][5] == pytest.approx(0.2)


def test_without_any_summary_it_is_trls_grpo():
    none = {"n_natural": [0] * 6, "n_artificial": [0] * 6}
    trl = evaluate("advantage", "grpo", {"rewards": ROWS["rewards"], "group": ROWS["group"]}, {"eps": 1e-4})
    torch.testing.assert_close(form(**none)["advantages"], trl["advantages"])
    torch.testing.assert_close(form(**none, split=False)["advantages"], trl["advantages"])


def test_one_group_for_all_compares_across_subgroups():
    out = form(split=False)
    z = form(split=True)
    assert float(out["advantages"].sum()) == pytest.approx(0, abs=1e-12)
    assert not torch.allclose(out["advantages"], z["advantages"])


def test_a_constant_or_single_subgroup_has_no_gradient_and_is_counted():
    out = form(rewards=[1.0, 1.15, 1.05, 0, 0, 0])
    assert out["advantages"].abs().max() < 1e-9 and out["constant_groups"] in (0, 1)
    single = form(n_natural=[1, 0, 0, 0, 0, 0], n_artificial=[0] * 6)
    assert single["advantages"][0] == 0 and single["advantages"][1:].abs().min() > 0
    dead = form(rewards=[1.0] + [0.5] * 5, n_natural=[1] + [0] * 5, n_artificial=[0] * 6)
    assert not dead["advantages"].any() and dead["constant_groups"] == 1


def test_a_negative_count_is_refused_and_an_unknown_one_is_none():
    with pytest.raises(DataError, match="n_natural of row 2 is negative"):
        form(n_natural=[1, 0, -1, 0, 0, 0])
    assert form(n_natural=[None] * 6)["is_summary"].tolist() == [False, True, True, False, False, False]


def test_a_larger_bonus_for_injected_summaries_is_refused():
    with pytest.raises(ConfigError, match="resum.artificial_bonus: must be <= natural_bonus"):
        create("advantage", "resum", artificial_bonus=0.3)


def test_summaries_are_counted_by_who_began_them():
    group = Group("g", "p", [0])
    (r,) = group.start(1)
    r.segments = [
        Segment([7, 8, 1, 7], "policy"),
        Segment([8], "policy"),
        Segment([7, 8], "tool"),
        Segment([7, 8], "hint"),
        Segment([8, 7, 8], "policy"),
    ]
    r.finish("eos")
    part = create("advantage", "resum", phrase=(7, 8))
    part.annotate([group], Context(0, 1, 1, 1, 9, {}))
    assert r.extras == {"n_natural": 3, "n_artificial": 1, "is_artificial_branch": True}


def test_the_bonus_is_not_added_to_masked_rows_of_the_batch():
    columns = {name: torch.tensor(values) for name, values in ROWS.items()}
    mask = torch.tensor([[1, 1], [1, 0], [0, 0], [1, 1], [1, 1], [0, 1]]).bool()
    batch = RolloutBatch({**columns, "response_mask": mask, "is_artificial_branch": torch.zeros(6)})
    got = create("advantage", "resum")(batch)["advantages"]
    torch.testing.assert_close(got.double(), form()["advantages"][:, None] * mask, atol=1e-6, rtol=1e-5)
