"""AdaPrefix: the controller's loop, its withdrawal, and the prefix in the rollout."""

import math

import pytest
import torch

import rlx_plugins as rlx
from rlx_plugins.testing import evaluate
from rlx_plugins.testing.scripted import ScriptedExecutor

SOLUTION = list(range(20, 30))


def adaprefix(solution_len, observations, total_steps, **params):
    return evaluate(
        "hint",
        "adaprefix",
        {"solution_len": solution_len, "observations": observations, "total_steps": total_steps},
        params,
    )


def run(part, reward, step=0, total_steps=1000, solution=SOLUTION, keys=("p0",), max_tokens=32):
    ctx = rlx.Context(
        step,
        total_steps,
        len(keys),
        4,
        max_tokens,
        {k: [1] for k in keys},
        keys,
        columns=lambda key: {"solution": solution},
    )
    return rlx.drive(rlx.rollout_program(rlx.Parts({"hint": [part]}), ctx), ScriptedExecutor(reward, length=3))


def test_failure_raises_the_share_to_its_bound_and_success_lowers_it_to_zero():
    out = adaprefix([100, 100], [{"0": 0, "1": 0}] * 60, 1000, interval=2)
    shares = [row[0] for row in out["fraction"][:60]]
    assert shares == sorted(shares) and shares[-1] == 0.9
    out = adaprefix([100, 100], [{"0": 1, "1": 1}] * 60, 1000, interval=2)
    shares = [row[0] for row in out["fraction"][:60]]
    assert shares == sorted(shares, reverse=True) and shares[-1] == 0.0


def test_success_at_the_target_moves_nothing():
    out = adaprefix([100], [{"0": 0.5}] * 30, 100, interval=1)
    assert {row[0] for row in out["fraction"][:30]} == {0.5}


def test_without_local_gain_all_offsets_stay_zero():
    out = adaprefix([10, 10], [{"0": 0, "1": 0.75}] * 20, 100, interval=2, gain_local=0)
    assert out["offset"] == [0, 0] and out["level"] != 0.5


def test_a_prompt_never_observed_follows_the_level_and_none_is_no_observation():
    out = adaprefix([100, 100, 100], [{"0": 0, "1": None}] * 4, 100, interval=2)
    assert out["success_ema"] == [0.0, None, None]
    assert out["fraction"][4][1] == out["fraction"][4][2] == pytest.approx(out["level"])


@pytest.mark.parametrize(("length", "expected"), [(0, 0), (1, 0), (2, 1), (3, 1)])
def test_the_prefix_is_never_the_whole_solution(length, expected):
    assert adaprefix([length], [], 10)["prefix_len"][0] == [expected]


def test_nothing_is_adapted_once_withdrawal_has_begun_and_nothing_given_after_its_end():
    failing = [{"0": 0}] * 20
    out = adaprefix([100], failing, 20, interval=5, gain_global=0.1, withdraw_start=0.5, withdraw_end=0.9)
    assert out["level"] == pytest.approx(0.5 + 2 * 0.1 * 0.5)
    assert out["envelope"][8:] == pytest.approx([1, 1, 1, *(1 - i / 8 for i in range(1, 8)), 0, 0])
    assert [row[0] for row in out["prefix_len"][-4:]] == [15, 7, 0, 0]


def test_withdrawal_without_duration_is_a_step_to_zero():
    assert adaprefix([10], [], 10, withdraw_start=0.5, withdraw_end=0.3)["envelope"] == [1] * 5 + [0] * 5


def test_the_loop_settles_where_the_prompt_is_solved_half_of_the_time():
    part = rlx.create("hint", "adaprefix", interval=2)
    needed = {"p0": 0.3, "p1": 0.7}
    share = {}
    for step in range(400):
        ctx = rlx.Context(step, 10_000, 2, 2, 1, {})
        share = {key: part.share(key, ctx) for key in needed}
        groups = []
        for key, need in needed.items():
            rate = 1 / (1 + math.exp(-20 * (share[key] - need)))
            rows = [rlx.Rollout(key, key, i, [], state="finished", reward=float(i == 0)) for i in range(2)]
            rows[0].propensity, rows[1].propensity = 1 / rate, 1 / (1 - rate)
            groups.append(rlx.Group(key, key, [], rollouts=rows))
        part.observe(groups, ctx)
    assert share == pytest.approx(needed, abs=0.02)


def test_the_prefix_is_a_hint_segment_outside_the_mask():
    (group,) = run(rlx.create("hint", "adaprefix"), lambda r: float(r.slot % 2))
    batch = rlx.pack([group])
    assert batch.response_ids[0].tolist() == [*SOLUTION[:5], 1, 1, 1]
    assert batch.hint_mask[0].tolist() == [True] * 5 + [False] * 3
    assert batch.response_mask[0].tolist() == [False] * 5 + [True] * 3
    assert bool(batch.helped.all())
    assert torch.equal(batch.lengths, torch.full((4,), 3))


def test_a_prefix_leaves_the_model_at_least_one_token():
    (group,) = run(rlx.create("hint", "adaprefix"), lambda r: 0.0, max_tokens=3)
    assert [len(s.tokens) for s in group.rollouts[0].segments] == [2, 1]


def test_success_is_a_reward_above_the_threshold_over_the_scorable_rollouts():
    part = rlx.create("hint", "adaprefix", success_threshold=0.2)
    run(part, lambda r: [0.3, 0.1, math.nan, 0.0][r.slot])
    assert part.success == {"p0": pytest.approx(1 / 3)}


def test_groups_of_one_prompt_in_a_step_count_as_one_observation():
    part = rlx.create("hint", "adaprefix", decay=0.5)
    run(part, lambda r: 1.0)
    run(part, lambda r: float(r.group.endswith(".0")), step=1, keys=("p0", "p0"))
    assert part.success == {"p0": pytest.approx(0.75)}


def test_a_restored_controller_goes_on_as_the_saved_one():
    saved = rlx.create("hint", "adaprefix", interval=2)
    for step in range(3):
        run(saved, lambda r: float(r.slot == 0), step=step)
    restored = rlx.create("hint", "adaprefix", interval=2)
    restored.load_state_dict(saved.state_dict())
    for step in range(3, 6):
        groups = [run(part, lambda r: float(r.slot == 0), step=step)[0] for part in (saved, restored)]
        assert groups[0].rollouts[0].tokens == groups[1].rollouts[0].tokens
    assert saved.state_dict() == restored.state_dict()
    assert saved.level != 0.5


def test_a_missing_column_is_named_with_its_remedy():
    part = rlx.create("hint", "adaprefix", column="proof")
    assert part.token_columns == {"proof"}
    with pytest.raises(rlx.ConfigError, match=r"'proof'.*hint.column=NAME"):
        run(part, lambda r: 0.0)


def test_a_column_left_as_text_is_refused():
    with pytest.raises(rlx.ConfigError, match="is text"):
        run(rlx.create("hint", "adaprefix"), lambda r: 0.0, solution="x = 2")


def test_an_initial_share_above_the_bound_is_refused():
    with pytest.raises(rlx.ConfigError, match="adaprefix.initial_share"):
        rlx.create("hint", "adaprefix", initial_share=0.8, max_share=0.5)
