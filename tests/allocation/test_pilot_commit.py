"""Pilot-Commit: screening, the buffer across rounds and steps, what is kept of the pilots."""

import math

import pytest

import rlx_plugins as rlx
from rlx_plugins.allocation.pilot_commit import largest_variance
from rlx_plugins.testing import evaluate
from rlx_plugins.testing.scripted import ScriptedExecutor

SMALL = {"n_pilot": 4, "n_commit": 2, "lower": 0.25, "upper": 0.25}


def run(part, step, offered, solved, groups=1, candidates=None, prompts=None):
    """One step; `solved` says how many pilots of a prompt succeed."""
    prompts = prompts or [f"p{i}" for i in range(99)]
    ctx = rlx.Context(step, 99, groups, 4, 1, {key: [7] for key in prompts}, offered=offered)
    executor = ScriptedExecutor(lambda r: float(r.slot < solved[r.prompt_key]), version=step, logp=-float(step + 1))
    ready = rlx.drive(rlx.rollout_program(rlx.Parts({"allocator": [part]}), ctx), executor)
    return ready, executor, ctx


@pytest.mark.parametrize(("right", "kept"), [(1, [1, 3]), (7, [3, 1]), (4, [2, 2])])
def test_the_kept_pilots_are_half_right_half_wrong_and_filled_from_the_longer_side(right, kept):
    rewards = [1.0] * right + [0.0] * (8 - right)
    chosen = [rewards[i] for i in largest_variance(rewards, 4)]
    assert [chosen.count(1.0), chosen.count(0.0)] == kept


def test_within_a_side_the_earlier_pilots_are_kept():
    assert largest_variance([0, 1, 0, 1, 1, 0], 4) == [0, 1, 2, 3]


def test_graded_rewards_keep_both_extremes():
    assert largest_variance([0.5, 0.9, 0.1, 0.6, 0.4], 3) == [1, 2, 4]


def test_prompts_at_both_ends_of_the_band_pass():
    part = rlx.create("allocator", "pilot_commit", **SMALL)
    assert [part.verdict(rate) for rate in (0.2, 0.25, 0.75, 0.8)] == ["too_hard", "passed", "passed", "too_easy"]


def test_a_prompt_that_passes_is_committed_in_the_next_round_and_never_in_its_own():
    part = rlx.create("allocator", "pilot_commit", candidates=1, **SMALL)
    ready, executor, _ = run(part, 0, ["p0", "p1", "p2"], {"p0": 2, "p1": 4, "p2": 0})
    assert [[r.prompt_key for r in rows] for rows in executor.launched] == [["p0"] * 4, ["p0"] * 2 + ["p1"] * 4]
    assert [g.prompt_key for g in ready] == ["p0"]


def test_a_training_group_is_the_kept_pilots_and_the_commits_in_slots_of_their_own():
    part = rlx.create("allocator", "pilot_commit", n_effective=2, candidates=1, **SMALL)
    (group,), _, _ = run(part, 0, ["p0", "p1"], {"p0": 3, "p1": 0})
    assert [(r.slot, r.tag, r.reward) for r in group.rollouts] == [
        (0, "pilot", 1.0),
        (3, "pilot", 0.0),
        (4, "", 0.0),
        (5, "", 0.0),
    ]
    assert {r.group for r in group.rollouts} == {group.id}
    assert rlx.pack([group]).source == ["pilot", "pilot", "fresh", "fresh"]


def test_without_kept_pilots_the_group_is_the_commits_alone():
    part = rlx.create("allocator", "pilot_commit", n_effective=0, candidates=1, **SMALL)
    (group,), _, _ = run(part, 0, ["p0", "p1"], {"p0": 3, "p1": 0})
    assert [r.slot for r in group.rollouts] == [4, 5]


def test_pilots_of_an_earlier_step_carry_their_behaviour_log_probs():
    part = rlx.create("allocator", "pilot_commit", candidates=2, **SMALL)
    first, _, _ = run(part, 0, ["p0", "p1", "p2", "p3"], {"p0": 2, "p1": 1, "p2": 0, "p3": 0})
    (late,), _, _ = run(part, 1, ["p4", "p5"], {"p1": 0, "p4": 0, "p5": 0})
    batch = rlx.pack([late], version=1)
    assert late.prompt_key == "p1"
    assert batch.staleness[:, 0].tolist() == [1, 1, 1, 1, 0, 0]
    assert batch.logp_behavior[:, 0].tolist()[:4] == [-1.0] * 4
    assert batch.logp_behavior[4:].isnan().all()
    assert all(s.logp_behavior is None for r in first[0].rollouts for s in r.segments)


def test_controllers_see_every_rollout_once():
    seen = []

    class Watching(type(rlx.create("sampler", "in_order"))):
        def observe(self, groups, ctx):
            seen.extend((r.prompt_key, r.slot) for g in groups for r in g.done())

    part = rlx.create("allocator", "pilot_commit", candidates=2, **SMALL)
    parts = rlx.Parts({"allocator": [part], "sampler": [Watching()]})
    for step in range(3):
        ctx = rlx.Context(step, 9, 1, 4, 1, {f"p{i}": [7] for i in range(99)})
        rlx.drive(rlx.rollout_program(parts, ctx), ScriptedExecutor(lambda r: float(r.slot < 2)))
    assert len(seen) == len(set(seen))
    assert ("p1", 5) in seen


def test_a_prompt_whose_pilots_were_never_scored_is_dropped():
    part = rlx.create("allocator", "pilot_commit", candidates=1, **SMALL)
    ctx = rlx.Context(0, 9, 1, 4, 1, {f"p{i}": [7] for i in range(9)}, offered=["p0"])
    ready = rlx.drive(rlx.rollout_program(rlx.Parts({"allocator": [part]}), ctx), ScriptedExecutor(lambda r: math.nan))
    assert ready == [] and part.buffer == []


def test_a_group_that_lost_its_rollouts_is_dropped_and_refilled():
    part = rlx.create("allocator", "pilot_commit", n_effective=0, candidates=2, **SMALL)
    ctx = rlx.Context(0, 9, 1, 4, 1, {f"p{i}": [7] for i in range(9)}, offered=["p0", "p1"])
    executor = ScriptedExecutor(lambda r: None if r.prompt_key == "p1" and r.slot > 3 else float(r.slot % 2))
    ready = rlx.drive(rlx.rollout_program(rlx.Parts({"allocator": [part]}), ctx), executor)
    assert [g.prompt_key for g in ready] == ["p0"]
    assert len(executor.launched) == 3


def test_prompts_that_wait_too_long_are_flushed():
    rounds = [{"prompts": [0, 1], "successes": [1, 2]}, *({"prompts": [i], "successes": [2]} for i in (2, 3, 9))]
    params = {**SMALL, "train_bsz": 1, "max_off_steps": 0, "order": "recent"}
    log = evaluate("allocator", "pilot_commit", {"rounds": rounds}, params)["log"]
    assert [entry["committed"] for entry in log] == [[], [1], [2], [3]]
    assert [entry["flushed"] for entry in log] == [[], [], [0], []]


def test_the_first_to_leave_the_buffer_follow_the_order():
    buffer = {"prompts": [1, 2, 3, 4], "successes": [4, 2, 6, 2]}
    got = {
        order: evaluate(
            "allocator",
            "pilot_commit",
            {"rounds": [buffer, {"prompts": [9], "successes": [0]}]},
            {"n_pilot": 8, "train_bsz": 3, "order": order},
        )["log"][1]["committed"]
        for order in ("max_variance", "recent", "fifo")
    }
    assert got == {"max_variance": [1, 4, 3], "recent": [4, 3, 2], "fifo": [1, 2, 3]}


def test_too_many_rounds_are_reported_naming_the_band():
    part = rlx.create("allocator", "pilot_commit", candidates=1, max_rounds=3, **SMALL)
    with pytest.raises(rlx.DataError, match=r"3 rounds.*\[0.25, 0.75\]"):
        run(part, 0, [f"p{i}" for i in range(9)], {f"p{i}": 0 for i in range(9)})
    rounds = [{"prompts": [i], "successes": [0]} for i in range(5)]
    out = evaluate("allocator", "pilot_commit", {"rounds": rounds}, {"max_rounds": 3})
    assert (out["status"], len(out["log"]), out["steps_done"]) == ("too_many_rounds", 3, 0)
    out = evaluate("allocator", "pilot_commit", {"rounds": rounds[:3]}, {"max_rounds": 3})
    assert (out["status"], len(out["log"])) == ("running", 3)


def test_mastered_prompts_are_left_out_from_the_next_epoch_on():
    part = rlx.create("allocator", "pilot_commit", candidates=2, **SMALL)
    keys, solved = ["p0", "p1", "p2", "p3"], {"p0": 4, "p1": 2, "p2": 2, "p3": 2}
    run(part, 0, keys, solved, prompts=keys)
    assert (part.excluded, part.excluded_next) == ([], ["p0"])
    _, executor, _ = run(part, 1, keys, solved, prompts=keys)
    assert part.excluded == ["p0"]
    assert "p0" not in {r.prompt_key for rows in executor.launched for r in rows}


def test_the_buffer_is_emptied_at_the_end_of_an_epoch():
    part = rlx.create("allocator", "pilot_commit", candidates=4, **SMALL)
    keys, solved = ["p0", "p1", "p2", "p3"], dict.fromkeys(["p0", "p1", "p2", "p3"], 2)
    run(part, 0, keys, solved, prompts=keys)
    assert len(part.buffer) == 3
    _, executor, _ = run(part, 1, [], solved, prompts=keys)
    assert executor.launched == [] and part.buffer == []


def test_a_prompt_waits_in_the_buffer_once_with_its_newest_pilots():
    part = rlx.create("allocator", "pilot_commit", candidates=3, order="fifo", **SMALL)
    run(part, 0, ["p0", "p1", "p1"], {"p0": 2, "p1": 1})
    assert [e["prompt_key"] for e in part.buffer] == ["p1"]


def test_a_restored_allocator_commits_what_the_saved_one_commits():
    saved = rlx.create("allocator", "pilot_commit", candidates=3, **SMALL)
    run(saved, 0, ["p0", "p1", "p2"], {"p0": 2, "p1": 1, "p2": 2})
    restored = rlx.create("allocator", "pilot_commit", candidates=3, **SMALL)
    restored.load_state_dict(saved.state_dict())
    more = ["p3", "p4", "p5"]
    solved = {"p0": 0, "p1": 0, "p2": 0, "p3": 2, "p4": 0, "p5": 3}
    (a,), (b,) = run(saved, 1, more, solved)[0], run(restored, 1, more, solved)[0]
    assert a.to_plain() == b.to_plain()
    assert saved.state_dict() == restored.state_dict()


@pytest.mark.parametrize(
    ("params", "field"),
    [({"lower": 0.6, "upper": 0.6}, "lower"), ({"n_effective": 17}, "n_effective"), ({"reward_low": 1}, "reward_low")],
)
def test_parameters_that_exclude_each_other_are_refused(params, field):
    with pytest.raises(rlx.ConfigError, match=f"pilot_commit.{field}"):
        rlx.create("allocator", "pilot_commit", **params)
