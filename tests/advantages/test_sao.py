"""SAO: GAE over model tokens with a length-dependent lambda, and the critic's targets."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlx_plugins import DataError, create
from rlx_plugins.hosts.table import TableHost, TableTrainer
from rlx_plugins.hosts.table.critic import TableCritic
from rlx_plugins.testing import evaluate


def form(rewards, values, mask, **params):
    return evaluate("advantage", "sao", {"rewards": rewards, "values": values, "response_mask": mask}, params)


def written_out(rewards, values, discount, lam):
    """GAE by the recursion, of one row without gaps."""
    out, last = [], 0.0
    for t in reversed(range(len(values))):
        after = values[t + 1] if t + 1 < len(values) else 0.0
        last = rewards[t] + discount * after - values[t] + discount * lam * last
        out.insert(0, last)
    return out


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.floats(-1, 1), st.floats(-1, 1)), min_size=1, max_size=9),
    st.floats(0, 1),
    st.sampled_from([0.05, 0.4, 1.5]),
)
def test_it_is_the_recursion_on_the_model_tokens(tokens, discount, alpha):
    rewards, values = zip(*tokens, strict=True)
    lam = max(0.0, 1 - 1 / (alpha * len(values)))
    out = form([list(rewards)], [list(values)], [[1] * len(values)], gamma=discount, alpha=alpha, lam_critic=0.7)
    assert out["lambda"].tolist() == pytest.approx([lam])
    assert out["advantages"][0].tolist() == pytest.approx(written_out(rewards, values, discount, lam), abs=1e-9)
    target = [a + v for a, v in zip(written_out(rewards, values, discount, 0.7), values, strict=True)]
    assert out["returns"][0].tolist() == pytest.approx(target, abs=1e-9)


def test_tool_output_is_taken_out_of_the_chain_whatever_its_values():
    dense = form([1.0], [[0.5, 0.6, 0.8]], [[1, 1, 1]])
    gappy = form([1.0], [[math.nan, 0.5, 9, 0.6, math.inf, 0.8]], [[0, 1, 0, 1, 0, 1]])
    for name in ("advantages", "returns"):
        torch.testing.assert_close(gappy[name][:, [1, 3, 5]], dense[name])
        assert not gappy[name][:, [0, 2, 4]].any()
    assert gappy["lambda"] == dense["lambda"]


def test_lambda_one_gives_the_outcome_minus_the_value():
    out = form([0.7, -1.0], [[0.5, 0.1, 0.3], [0.2, 0.4, 9.0]], [[1, 1, 1], [1, 1, 0]], lam=1.0)
    torch.testing.assert_close(out["advantages"], torch.tensor([[0.2, 0.6, 0.4], [-1.2, -1.4, 0]], dtype=torch.float64))
    assert out["returns"].tolist() == [[pytest.approx(0.7)] * 3, [pytest.approx(-1), pytest.approx(-1), 0]]


def test_a_perfect_critic_leaves_nothing():
    assert form([0.4], [[0.4] * 5], [[1] * 5])["advantages"].abs().max() < 1e-12


def test_lambda_grows_with_length_from_zero_and_an_empty_row_is_zero():
    mask = [[1] * n + [0] * (9 - n) for n in (0, 1, 2, 9)]
    out = form([1.0] * 4, [[0.5] * 9] * 4, mask)
    assert out["lambda"].tolist() == pytest.approx([0, 1 / 3, 2 / 3, 1 - 1 / 13.5])
    assert not out["advantages"][0].any() and out["advantages"][1, 0] == 0.5
    assert form([1.0], [[0.2]], [[1]], alpha=0.5)["lambda"] == 0


def test_a_value_that_is_not_a_number_names_the_row():
    with pytest.raises(DataError, match="model token of row 1"):
        form([1.0, 1.0], [[0.1], [math.nan]], [[1], [1]])


def test_whitening_is_an_option_over_the_tokens_that_count():
    inputs = ([1.0, 0.0, None], [[0.5, 0.1], [0.2, 0.4], [0.3, 0.3]], [[1, 1], [1, 0], [1, 1]])
    plain, white = form(*inputs), form(*inputs, whiten=True)
    live = plain["advantages"][[0, 0, 1], [0, 1, 0]]
    torch.testing.assert_close(
        white["advantages"][[0, 0, 1], [0, 1, 0]], (live - live.mean()) / live.std(), atol=1e-6, rtol=0
    )
    assert not white["advantages"][2].any() and not plain["returns"][2].any()


def test_a_fixed_lambda_and_the_papers_are_different():
    assert create("advantage", "sao").actor_lambda is None
    fixed = form([1.0], [[0.5, 0.6]], [[1, 1]], lam=0.0)
    assert fixed["advantages"].tolist() == [[pytest.approx(0.1), pytest.approx(0.4)]]


def test_on_the_table_host_a_critic_learns_what_single_rollouts_return():
    trainer = TableTrainer({"method": "sao"}, host=TableHost(6), groups=6, group_size=1, max_tokens=8, total_steps=40)
    with_critic, without = 0.0, 0.0
    for step in range(40):
        batch = trainer.rollouts(trainer.context())
        mask = batch.response_mask
        returns = trainer.parts.one("advantage")(batch)["returns"][mask]
        assert step or not batch["values"].any()
        if step >= 20:
            with_critic += float((returns - batch["values"][mask]).square().sum())
            without += float(returns.square().sum())
        trainer.train_step()
    assert with_critic < 0.5 * without
    assert trainer.log[-1]["reward"] > trainer.log[0]["reward"]


def test_the_table_critic_moves_the_values_it_has_targets_for_and_no_others():
    critic = TableCritic(2, rate=0.5)
    prompt, previous = torch.tensor([0, 1, 0]), torch.tensor([[5, 1], [5, 9], [5, 2]])
    mask = torch.tensor([[1, 1], [1, 0], [1, 1]]).bool()
    critic.fit(prompt, previous, torch.tensor([[1.0, 2.0], [4.0, math.nan], [0.0, 0.5]]), mask)
    want = torch.zeros(2, 6, dtype=torch.float64)
    want[0, 5], want[0, 1], want[1, 5], want[0, 2] = 0.25, 1.0, 2.0, 0.25
    assert torch.equal(critic.value, want) and critic(prompt, previous)[0].tolist() == [0.25, 1.0]
