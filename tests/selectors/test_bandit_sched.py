"""The bandit over rollouts: what it chooses, what it learns from, and what it remembers."""

import math

import pytest
import torch

import rlx_plugins as rlx
from rlx_plugins.core.segments import Segments
from rlx_plugins.hosts.table import TableHost, TableTrainer
from rlx_plugins.selectors.bandit_sched import FEATURES, choose
from rlx_plugins.testing import evaluate
from rlx_plugins.testing.evaluation.building import reward_batch

NAN = math.nan


def inputs(n=5, seed=0):
    g = torch.Generator().manual_seed(seed)
    return {
        "x": torch.randn(n, 10, generator=g, dtype=torch.float64),
        "W1": torch.randn(10, 4, generator=g, dtype=torch.float64),
        "b1": torch.randn(4, generator=g, dtype=torch.float64),
        "W2": torch.randn(4, generator=g, dtype=torch.float64),
        "b2": 0.3,
        "budget": 2,
        "u_explore": [0.9] * n,
        "u_rank": torch.rand(n, generator=g, dtype=torch.float64),
    }


def run(d, **parameters):
    return evaluate("selector", "bandit_sched", d, parameters)


def test_without_exploration_the_highest_scores_are_chosen_and_with_it_the_random_order():
    d = inputs()
    out = run(d, eps=0.0)
    assert out["selected"].tolist() == out["scores"].argsort(descending=True)[:2].tolist()
    assert run(d, eps=1.0)["selected"].tolist() == d["u_rank"].argsort()[:2].tolist()


def test_each_choice_explores_by_its_own_draw_and_takes_no_row_twice():
    d = inputs() | {"budget": 3, "u_explore": [0.9, 0.05, 0.9, 0.9, 0.9]}
    out = run(d)
    best = out["scores"].argsort(descending=True).tolist()
    first = best[0]
    second = next(i for i in d["u_rank"].argsort().tolist() if i != first)
    third = next(i for i in best if i not in (first, second))
    assert out["selected"].tolist() == [first, second, third]


@pytest.mark.parametrize(("budget", "n", "size"), [(9, 5, 5), (0, 5, 0), (3, 0, 0)])
def test_the_number_chosen_is_the_smaller_of_budget_and_candidates(budget, n, size):
    d = inputs(max(n, 1)) | {"budget": budget}
    d |= {"x": d["x"][:n], "u_rank": d["u_rank"][:n]}
    out = run(d)
    assert len(set(out["selected"].tolist())) == size
    if not size:
        assert out["loss"] == 0
        torch.testing.assert_close(out["W1"], d["W1"])


def test_permuting_candidates_permutes_the_choice():
    d = inputs()
    order = torch.tensor([3, 1, 4, 0, 2])
    moved = run(d | {"x": d["x"][order], "u_rank": d["u_rank"][order]})
    assert order[moved["selected"]].tolist() == run(d)["selected"].tolist()


@pytest.mark.parametrize(
    ("entropies", "cost"), [((0.2, 0.9), 0.0), ((0.5, 1.4), 0.04), ((1.2, 1.4), 0.02), ((1.4, 1.2), 0.0)]
)
def test_the_reward_is_the_gain_less_the_entropy_gained_above_the_threshold(entropies, cost):
    out = run(inputs(), v_prev=0.3, v_next=0.5, ent_prev=entropies[0], ent_next=entropies[1])
    assert out["reward"] == pytest.approx(0.2 - cost)


def test_the_step_is_gradient_descent_on_the_squared_error_of_the_chosen():
    d = inputs()
    out = run(d, eps=0.0, v_prev=0.0, v_next=0.7, lr=0.01)
    weights = {k: d[k].clone().requires_grad_() for k in ("W1", "b1", "W2")}
    x = d["x"][out["selected"]]
    loss = ((torch.relu(x @ weights["W1"] + weights["b1"]) @ weights["W2"] + 0.3 - 0.7) ** 2).mean()
    assert out["loss"] == pytest.approx(float(loss.detach()))
    for (name, w), g in zip(weights.items(), torch.autograd.grad(loss, list(weights.values())), strict=True):
        torch.testing.assert_close(out[name], (w - 0.01 * g).detach())
    again = run(d | {k: out[k] for k in ("W1", "b1", "W2", "b2")}, eps=0.0, v_prev=0.0, v_next=0.7)
    assert again["loss"] < out["loss"]


def test_the_first_step_updates_nothing_and_an_unknown_feature_counts_as_zero():
    d = inputs()
    out = run(d, v_prev=None)
    torch.testing.assert_close(out["W1"], d["W1"])
    zero, unknown = d["x"].clone(), d["x"].clone()
    zero[:, 3], unknown[:, 3] = 0.0, NAN
    torch.testing.assert_close(run(d | {"x": unknown})["scores"], run(d | {"x": zero})["scores"])


def test_every_group_makes_its_own_choices():
    groups = Segments(torch.tensor([5, 2, 5, 2, 2, 9]))
    scores = torch.tensor([1.0, 5.0, 2.0, 3.0, 4.0, 0.0])
    explore = [torch.tensor([False, True, False, True, True, False]), torch.zeros(6).bool()]
    live = torch.tensor([True, True, True, True, True, False])
    order = choose(scores, groups, live, explore, torch.tensor([0.1, 0.9, 0.2, 0.3, 0.8, 0.4]))
    assert order.tolist() == [1, 1, 0, 0, -1, -1]


def batch_of(rewards, step=0):
    n = len(rewards)
    mask = torch.arange(4) < torch.tensor([4, 2, 0, 3, 1, 4])[:n, None]
    batch = reward_batch(rewards, [0, 0, 0, 1, 1, 1][:n], mask.double()).with_columns(
        advantages=torch.where(mask, torch.tensor(rewards)[:, None] - 0.5, NAN).double(),
        entropy=torch.where(mask, 0.5, NAN).double(),
        staleness=torch.full((n, 4), 3),
        finished=torch.tensor([True, False, True, True, True, True])[:n],
    )
    return rlx.RolloutBatch(batch, step=step, seed=1)


REWARDS = [1.0, 0.0, 1.0, 0.0, NAN, 1.0]


def test_the_features_of_a_rollout():
    part = rlx.create("selector", "bandit_sched", max_length=8)
    x = part.features(batch_of(REWARDS))
    rows = {name: x[:, i].tolist() for i, name in enumerate(FEATURES)}
    assert rows["advantage"][:2] == [0.5, -0.5]
    assert rows["group_mean"][0] == pytest.approx(2 / 3) and rows["group_std"][3] == pytest.approx(0.5**0.5)
    assert rows["length"][:4] == [0.5, 0.25, 0.0, 0.375] and rows["truncated"][:3] == [0, 1, 0]
    assert rows["entropy"][0] == 0.5 and rows["age"][0] == pytest.approx(0.3) and rows["usage"] == [0.0] * 6


def test_rows_without_tokens_or_reward_are_no_candidates_and_usage_is_counted():
    part = rlx.create("selector", "bandit_sched", budget=3)
    out = part(batch_of(REWARDS))
    assert out["weight"].any(1).tolist() == [True, True, False, True, False, True]
    assert part.features(batch_of(REWARDS, step=1))[:, 9].tolist() == [0.25, 0.25, 0, 0.25, 0, 0.25]
    part(batch_of(REWARDS, step=50))
    assert all(n == 2 for n, _ in part.usage.values())


def test_what_is_learnt_is_the_gain_after_the_choice_and_it_survives_a_restart():
    first = rlx.create("selector", "bandit_sched", budget=1, learning_rate=0.1)
    assert "loss" not in first(batch_of(REWARDS))
    resumed = rlx.create("selector", "bandit_sched", budget=1, learning_rate=0.1)
    resumed.load_state_dict(first.state_dict())
    before = first.network["W2"].clone()
    outs = [part(batch_of([1.0] * 6, step=1)) for part in (first, resumed)]
    assert outs[0]["reward"] == pytest.approx(1 - 3 / 5) and outs[0]["loss"] == outs[1]["loss"] > 0
    assert torch.equal(first.network["W2"], resumed.network["W2"]) and not torch.equal(first.network["W2"], before)


def test_a_run_trains_the_budget_of_every_group():
    trainer = TableTrainer(
        {"selector": {"name": "bandit_sched", "budget": 2}}, host=TableHost(8), groups=3, group_size=4, max_tokens=8
    )
    log = trainer.run(3)
    assert all(0 < entry["selector/kept_tokens"] < 1 for entry in log)
    assert "selector/bandit_sched/loss" in log[1] and "selector/bandit_sched/loss" not in log[0]
