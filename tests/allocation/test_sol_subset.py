"""Sol-RL's subset: the extremes of the pool, and a group made of them alone."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import rlx_plugins as rlx
from rlx_plugins.hosts.table import TableHost, TableTrainer
from rlx_plugins.testing import evaluate

NAN, INF = math.nan, math.inf
REWARD = st.one_of(st.integers(-3, 3).map(float), st.sampled_from([NAN, INF]))


def run(rewards, group=None, **parameters):
    out = evaluate(
        "selector", "sol_subset", {"proxy_rewards": rewards, "group": group or [0] * len(rewards)}, parameters
    )
    return out["selected"], out["diag"]


@settings(max_examples=60, deadline=None)
@given(st.lists(REWARD, min_size=1, max_size=15), st.integers(1, 4), st.integers(1, 4))
def test_the_best_and_the_worst_are_taken_and_ties_go_by_index(rewards, k_top, k_bottom):
    selected, _ = run(rewards, k_top=k_top, k_bottom=k_bottom)
    top, bottom = selected["0"]["top"], selected["0"]["bottom"]
    pool = [i for i, x in enumerate(rewards) if math.isfinite(x)]
    assert not set(top) & set(bottom) and set(top) | set(bottom) <= set(pool)
    assert top == sorted(top) and bottom == sorted(bottom)
    if len(pool) > k_top + k_bottom:
        assert (len(top), len(bottom)) == (k_top, k_bottom)
    else:
        assert len(top) + len(bottom) == len(pool) and len(top) == min(k_top, -(-len(pool) // 2))
    for i in top:
        assert all(rewards[i] > rewards[j] or (rewards[i] == rewards[j] and i < j) for j in pool if j not in top)
    for i in bottom:
        assert all(rewards[i] < rewards[j] or (rewards[i] == rewards[j] and i > j) for j in pool if j not in bottom)


def test_an_increasing_transform_changes_nothing_and_the_spread_grows():
    rewards = torch.randn(30, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    selected, diag = run(rewards, k_top=4, k_bottom=4)
    assert run(rewards.exp(), k_top=4, k_bottom=4)[0] == selected
    assert diag["0"]["selected_std"] > diag["0"]["pool_std"]


@pytest.mark.parametrize(("rewards", "top", "bottom"), [([1.0], [0], []), ([NAN, INF], [], []), ([2.0] * 5, [0], [4])])
def test_small_empty_and_flat_pools(rewards, top, bottom):
    selected, diag = run(rewards, k_top=1, k_bottom=1)
    assert selected["0"] == {"top": top, "bottom": bottom}
    assert diag["0"]["selected_std"] == 0


def test_the_same_rewards_in_full_precision_have_no_inversions_and_reversed_ones_have_all():
    inputs = {"proxy_rewards": [0.1, 0.5, 0.9, 0.2], "group": [3] * 4}
    for true, count in (([0.1, 0.5, 0.9, 0.2], 0), ([0.9, 0.5, 0.1, 0.8], 4)):
        out = evaluate("selector", "sol_subset", inputs | {"true_rewards": true}, {"k_top": 2, "k_bottom": 2})
        assert out["diag"]["3"]["inversions"] == count


def group_of(rewards):
    group = rlx.Group("g", "p", [1])
    for r, reward in zip(group.start(len(rewards)), rewards, strict=True):
        r.finish("eos")
        r.reward = reward
    return group


def context():
    return rlx.Context(0, 1, groups=1, group_size=4, max_tokens=4, prompts={"p": [1]})


def test_a_flat_prompt_may_be_left_out_of_the_batch():
    for drop, left in ((False, 2), (True, 0)):
        group = group_of([1.0] * 4)
        rlx.create("allocator", "sol_subset", k_top=1, k_bottom=1, drop_flat=drop).complete(group, context())
        assert len(group.done()) == left


def test_in_a_run_advantages_come_from_the_chosen_and_controllers_see_the_pool():
    config = {"method": {"name": "sol_subset", "pool": 10, "k_top": 2, "k_bottom": 2}, "advantage": "grpo"}
    trainer = TableTrainer(config, host=TableHost(8), groups=3, group_size=4, max_tokens=8)
    ctx = trainer.context()
    batch = trainer.rollouts(ctx)
    assert batch.groups.sizes.tolist() == [4, 4, 4] and all(len(g.rollouts) == 10 for g in ctx.started)
    ready = rlx.prepare(trainer.parts, batch).batch
    row = ready.advantages[:, 0]
    torch.testing.assert_close(ready.groups.sum(row), torch.zeros(3).double())
    assert set(ctx.metrics) >= {"allocator/sol_subset_pool_std", "allocator/sol_subset_chosen_std"}
    assert ctx.metrics["allocator/sol_subset_chosen_std"] >= ctx.metrics["allocator/sol_subset_pool_std"]
