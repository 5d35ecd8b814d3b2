"""VADE: what the draw chooses, what counting and decay do, what is remembered."""

import math

import pytest
import torch

import rlx_plugins as rlx
from rlx_plugins.sampling.vade import utility
from rlx_plugins.testing import evaluate
from rlx_plugins.testing.scripted import ScriptedExecutor, table

KEYS = [f"p{i}" for i in range(6)]


def context(step=0, groups=2, group_size=2, keys=KEYS, **more):
    return rlx.Context(step, 10, groups, group_size, 4, {key: [1] for key in keys}, **more)


def finished(key, rewards, propensity=1.0):
    group = rlx.Group(f"{key}#0", key, [1])
    for slot, reward in enumerate(rewards):
        group.rollouts.append(rlx.Rollout(key, group.id, slot, [1], state="finished", reward=reward))
        group.rollouts[-1].propensity = propensity if reward else 1.0
    return group


def counts(part):
    return dict(zip(part.keys, zip(part.successes.tolist(), part.failures.tolist())))


def test_the_utility_is_zero_at_both_ends_and_largest_at_one_third():
    grid = torch.linspace(0, 1, 301, dtype=torch.float64)
    u = utility(grid)
    assert u[0] == u[-1] == 0
    assert u.argmax() == 100
    assert u.max() == pytest.approx(4 / 27)


def test_ties_go_to_the_prompt_that_stands_first():
    out = evaluate(
        "sampler", "vade", {"alpha": [0] * 4, "beta": [0] * 4, "batch_size": 3, "theta": [0.5, 0.3, 0.5, 0.3]}
    )
    assert out["selected"] == [1, 3, 0]
    many = {"alpha": [0] * 300, "beta": [0] * 300, "batch_size": 300, "theta": [0.5, 0.3, 0.9] * 100}
    thirds = [list(range(i, 300, 3)) for i in (1, 0, 2)]
    assert evaluate("sampler", "vade", many)["selected"] == sum(thirds, [])


def test_permuting_prompts_with_their_draws_permutes_the_selection():
    theta, order = [0.1, 0.4, 0.7, 0.25, 0.9], [3, 0, 4, 1, 2]
    plain = evaluate("sampler", "vade", {"alpha": [0] * 5, "beta": [0] * 5, "batch_size": 3, "theta": theta})
    moved = evaluate(
        "sampler", "vade", {"alpha": [0] * 5, "beta": [0] * 5, "batch_size": 3, "theta": [theta[i] for i in order]}
    )
    assert [order[i] for i in moved["selected"]] == plain["selected"]


def test_a_pool_smaller_than_the_batch_gives_what_it_has():
    out = evaluate(
        "sampler", "vade", {"alpha": [0, 0], "beta": [0, 0], "batch_size": 5, "theta": [0.3, 0.5], "exclude": [0]}
    )
    assert out["selected"] == [1]


def test_the_seeded_draw_is_numpys_beta_over_all_prompts_at_once():
    np = pytest.importorskip("numpy")
    alpha, beta = [2.0, 0.0, 5.0], [1.0, 0.0, 0.5]
    theta = np.random.Generator(np.random.PCG64(7)).beta(np.array(alpha) + 1, np.array(beta) + 1, size=3)
    out = evaluate("sampler", "vade", {"alpha": alpha, "beta": beta, "batch_size": 1, "seed": 7})
    assert out["utility"].tolist() == pytest.approx(list(theta * (1 - theta) ** 2))


def test_without_decay_the_posterior_mean_is_plain_counting():
    part = rlx.create("sampler", "vade", decay_sample=1, decay_global=1)
    part.observe([finished("p1", [1, 0, 1])], context())
    part.observe([finished("p1", [0, 0]), finished("p2", [1])], context(1))
    assert part.mean().tolist() == pytest.approx([1 / 2, 3 / 7, 2 / 3, 1 / 2, 1 / 2, 1 / 2])


def test_a_visited_prompt_fades_fast_and_all_others_slowly():
    part = rlx.create("sampler", "vade", decay_sample=0.5, decay_global=0.9)
    part.observe([finished("p0", [1, 1]), finished("p1", [0, 0])], context())
    part.observe([finished("p0", [0])], context(1))
    assert counts(part)["p0"] == pytest.approx((1.0, 1.0))
    assert counts(part)["p1"] == pytest.approx((0.0, 1.8))


def test_two_groups_of_a_prompt_add_up_and_decay_once():
    part = rlx.create("sampler", "vade", decay_sample=0.5)
    part.observe([finished("p0", [1, 1])], context())
    part.observe([finished("p0", [1, 0]), finished("p0", [0])], context(1))
    assert counts(part)["p0"] == pytest.approx((2.0, 2.0))


@pytest.mark.parametrize("rewards", [[], [math.nan, math.inf]], ids=["no rollouts", "none finite"])
def test_a_prompt_without_a_finite_reward_counts_as_not_visited(rewards):
    part = rlx.create("sampler", "vade", decay_sample=0.5, decay_global=0.9)
    part.observe([finished("p0", [1, 1])], context())
    part.observe([finished("p0", rewards)], context(1))
    assert counts(part)["p0"] == pytest.approx((1.8, 0.0))


def test_a_step_without_visits_decays_everything():
    part = rlx.create("sampler", "vade", decay_global=0.9)
    part.observe([finished("p0", [1, 0])], context())
    part.observe([], context(1))
    assert counts(part)["p0"] == pytest.approx((0.9, 0.9))


def test_rewards_outside_the_unit_interval_are_clipped_and_graded_ones_count_in_part():
    part = rlx.create("sampler", "vade")
    part.observe([finished("p0", [3.0, -2.0, 0.25])], context())
    assert counts(part)["p0"] == pytest.approx((1.25, 1.75))


def test_survivors_of_a_pruner_count_by_their_propensity():
    part = rlx.create("sampler", "vade")
    part.observe([finished("p0", [1, 1, 0], propensity=0.5)], context())
    assert counts(part)["p0"] == pytest.approx((3 * 4 / 5, 3 * 1 / 5))


def test_a_prompt_already_started_in_the_step_is_not_drawn_again():
    part, ctx = rlx.create("sampler", "vade"), context()
    first = part.draw(4, ctx)
    ctx.started = [rlx.Group(key, key, [1]) for key in first]
    assert set(first) | set(part.draw(4, ctx)) == set(KEYS)
    assert len(part.draw(4, ctx)) == 2


def test_the_program_trains_on_the_drawn_prompts_and_tells_the_sampler_their_rewards():
    part = rlx.create("sampler", "vade")
    ctx = context()
    expected = rlx.create("sampler", "vade").draw(2, context())
    ready = rlx.drive(
        rlx.rollout_program(rlx.Parts({"sampler": [part]}), ctx), ScriptedExecutor(table({k: [1, 0] for k in KEYS}))
    )
    assert [g.prompt_key for g in ready] == expected
    assert {key for key, seen in counts(part).items() if sum(seen)} == set(expected)


def test_a_restored_sampler_draws_what_the_saved_one_draws():
    saved = rlx.create("sampler", "vade")
    saved.observe([finished("p4", [1, 0, 0]), finished("p2", [1, 1])], context())
    restored = rlx.create("sampler", "vade")
    restored.load_state_dict(saved.state_dict())
    for step in range(1, 6):
        assert restored.draw(3, context(step)) == saved.draw(3, context(step))
    assert rlx.create("sampler", "vade").draw(6, context(1)) != saved.draw(6, context(1))


def test_counts_belong_to_prompt_keys_when_the_dataset_is_reordered():
    part = rlx.create("sampler", "vade", decay_global=1)
    part.observe([finished("p1", [1, 1, 0])], context())
    part.observe([], context(1, keys=["new", *reversed(KEYS)]))
    assert counts(part)["p1"] == pytest.approx((2.0, 1.0))
    assert counts(part)["new"] == (0.0, 0.0)
