"""AERO: a posterior success rate for groups that agree."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlx_plugins import DataError, RolloutBatch, create
from rlx_plugins.testing import evaluate


def run(rewards, group=None, params=None, **counts):
    group = [0] * len(rewards) if group is None else group
    out = evaluate("advantage", "aero", {"rewards": rewards, "group": group, **counts}, params)
    return out["advantages"].tolist(), out["posterior_mean"].tolist()


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from([0.0, 1.0]),
    st.integers(1, 5),
    st.integers(0, 20),
    st.floats(0.2, 4),
    st.floats(0.2, 4),
    st.sampled_from(["bernoulli", "constant", "zero"]),
)
def test_a_group_that_agrees_is_compared_with_its_posterior_mean(reward, kept, rejected, a0, b0, homogeneous):
    n = kept + rejected
    c = n if reward else 0
    got, mean = run(
        [reward] * kept + [math.nan],
        params={"a0": a0, "b0": b0, "homogeneous": homogeneous},
        n_success=[c] * (kept + 1),
        n_total=[n] * (kept + 1),
    )
    u = (c + a0) / (n + a0 + b0)
    want = {"bernoulli": (reward - u) / math.sqrt(u * (1 - u)), "constant": 2 * u - 1, "zero": 0.0}[homogeneous]
    assert mean == pytest.approx([u] * (kept + 1))
    assert got == pytest.approx([want] * kept + [0])


@pytest.mark.parametrize("n", [1, 3, 12])
def test_with_a_flat_prior_the_pull_is_one_over_the_root_of_n_plus_one(n):
    assert run([1.0] * n)[0] == pytest.approx([math.sqrt(1 / (n + 1))] * n)
    assert run([0.0] * n)[0] == pytest.approx([-math.sqrt(1 / (n + 1))] * n)


MIXED = st.lists(st.sampled_from([0.0, 1.0]), min_size=2, max_size=9).filter(lambda r: 0 < sum(r) < len(r))


@settings(max_examples=40, deadline=None)
@given(MIXED, st.sampled_from([0, 1]))
def test_a_mixed_group_is_grpo_whatever_the_prior_and_full_counts_of_unrejected_rows_change_nothing(rewards, ddof):
    want = evaluate("advantage", "grpo", {"rewards": rewards, "group": [0] * len(rewards)}, {"ddof": ddof})
    want = want["advantages"].tolist()
    assert run(rewards, params={"ddof": ddof, "a0": 3.0})[0] == pytest.approx(want)
    assert run(rewards, params={"ddof": ddof, "stats": "full"})[0] == pytest.approx(want, rel=1e-5)


def test_full_statistics_undo_the_shift_of_the_mean_by_rejection():
    got, _ = run([1.0, 0.0], params={"stats": "full"}, n_success=[2, 2], n_total=[8, 8])
    everything = torch.tensor([1.0] * 2 + [0.0] * 6, dtype=torch.float64)
    z = (everything - everything.mean()) / (everything.std() + 1e-6)
    assert got == pytest.approx([float(z[0]), float(z[-1])])


def test_only_successes_kept_of_a_mixed_prompt_are_scored_as_rare_successes():
    u = 2 / 10
    assert run([1.0], n_success=[1], n_total=[8])[0] == pytest.approx([(1 - u) / math.sqrt(u * (1 - u))])


def test_counts_come_from_the_first_scorable_row_and_are_counted_where_unknown():
    _, mean = run([None, 1.0, 1.0], n_success=[0, 3, 9], n_total=[9, 3, 9])
    assert mean == pytest.approx([4 / 5] * 3)
    _, mean = run([1.0, 1.0], n_success=[None, 5], n_total=[None, 5])
    assert mean == pytest.approx([3 / 4] * 2)


def test_a_group_without_a_scorable_row_has_the_prior_and_no_advantage():
    got, mean = run([None, None, 1.0], [0, 0, 1], {"a0": 3.0}, n_success=[7, 7, 1], n_total=[9, 9, 1])
    assert got[:2] == [0, 0] and mean[:2] == pytest.approx([0.75] * 2)


@pytest.mark.parametrize(("c", "n"), [(3, 2), (1, 1)])
def test_counts_that_can_not_be_are_refused_by_name_of_the_group(c, n):
    with pytest.raises(DataError, match=f"group 5: n_success {c} and n_total {n} do not fit 2 scorable rows"):
        run([1.0, 1.0], [5, 5], n_success=[c] * 2, n_total=[n] * 2)


def test_rewards_within_the_tolerance_agree_and_a_success_is_above_the_threshold():
    assert run([1.0, 1.0 - 1e-10])[0] == pytest.approx([math.sqrt(1 / 3)] * 2)
    batch = RolloutBatch(
        {
            "rewards": torch.tensor([0.4, 0.4], dtype=torch.float64),
            "group": torch.tensor([0, 0]),
            "response_mask": torch.ones(2, 1, dtype=torch.bool),
        }
    )
    assert create("advantage", "aero")(batch)["posterior_mean"][0] == pytest.approx(0.25)
    assert create("advantage", "aero", success_threshold=0.3)(batch)["posterior_mean"][0] == pytest.approx(0.75)
