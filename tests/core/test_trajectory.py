"""Segments, rollouts and groups: what the rollout program moves."""

import math

import pytest
import torch

from rlx_plugins import Group, Rollout, Segment


def group_of(*rollouts):
    return Group("g", "p", [7], rollouts=list(rollouts))


def finished(reward, propensity=1.0, slot=0):
    r = Rollout("p", "g", slot, [7], propensity=propensity)
    r.finish("eos")
    r.reward = reward
    return r


def test_tokens_of_a_rollout_are_those_of_its_segments_in_order():
    r = Rollout("p", "g", 0, [7], segments=[Segment([1, 2], "hint"), Segment([3])])
    assert (r.tokens, len(r)) == ([1, 2, 3], 3)


def test_an_empty_rollout_is_true():
    assert Rollout("p", "g", 0, [7])


def test_the_head_of_a_segment_cuts_its_log_probs_too():
    s = Segment([1, 2, 3], logp=[-1.0, -2.0, -3.0], logp_behavior=[-4.0, -5.0, -6.0], version=2)
    assert s.head(2) == Segment([1, 2], logp=[-1.0, -2.0], logp_behavior=[-4.0, -5.0], version=2)


def top(*ids):
    """An engine's report of two tokens at each place; the log-prob tells the id."""
    ids = torch.tensor(ids, dtype=torch.int32)
    return ids, -0.1 * ids


def test_the_head_and_a_fork_keep_what_the_engine_reported_of_their_tokens():
    s = Segment([1, 2, 3], top=top([1, 4], [5, 2], [3, 6]))
    assert s.head(2).top[0].tolist() == [[1, 4], [5, 2]] and len(s.head(2).top[1]) == 2
    g = Group("g", "p", [7])
    (base,) = g.start(1)
    base.segments = [s]
    (fork,) = g.fork(base, 1, 1)
    assert fork.segments[0].top[0].tolist() == [[1, 4]] and Segment([1]).head(1).top is None


def test_a_segment_that_is_extended_knows_what_was_reported_of_either_run():
    s = Segment([1], logp_behavior=[-3.0])
    s.extend([2])
    assert (s.tokens, s.logp, s.top) == ([1, 2], None, None) and math.isnan(s.logp_behavior[1])
    s.extend([3], [-1.0], top([3, 4]))
    assert s.tokens == [1, 2, 3] and [math.isnan(x) for x in s.logp] == [True, True, False]
    s.extend([5])
    assert s.top[0].tolist() == [[-1, -1], [-1, -1], [3, 4], [-1, -1]] and s.top[0].dtype == torch.int32
    assert torch.isnan(s.top[1]).tolist() == [[True, True], [True, True], [False, False], [True, True]]


def test_a_rollout_is_helped_by_a_hint_in_its_context_or_its_response():
    assert Rollout("p", "g", 0, [7], context=[1]).helped
    assert Rollout("p", "g", 0, [7], segments=[Segment([1], "hint")]).helped
    assert not Rollout("p", "g", 0, [7], teacher_context=[1], segments=[Segment([1])]).helped


def test_rollouts_started_together_share_a_wave_and_slots_go_on():
    g = Group("g", "p", [7], max_tokens=9)
    g.start(2)
    second = g.start(3)
    assert [(r.slot, r.wave) for r in g.rollouts] == [(0, 0), (1, 0), (2, 1), (3, 1), (4, 1)]
    assert g.wave() == second
    assert {(r.group, r.prompt_key, r.max_tokens) for r in g.rollouts} == {("g", "p", 9)}


def test_a_fork_copies_the_prefix_untrained_and_its_sampling_settings():
    g = Group("g", "p", [7])
    (base,) = g.start(1)
    base.context, base.temperature = [5], 0.7
    base.segments = [Segment([1, 2], "hint"), Segment([3, 4, 5], logp=[-1.0, -2.0, -3.0])]
    (new,) = g.fork(base, 3, 1)
    assert [(s.tokens, s.source, s.logp, s.trained) for s in new.segments] == [
        ([1, 2], "hint", None, False),
        ([3], "policy", [-1.0], False),
    ]
    assert (new.context, new.temperature, new.tag, new.wave) == ([5], 0.7, "fork:0@3", 1)


def test_a_fork_continues_the_prompt_of_its_parent():
    g = Group("a#0", "a", [1])
    (base,) = g.start(1)
    base.prompt, base.segments = [8, 9, 1], [Segment([2, 3])]
    (new,) = g.fork(base, 1, 1)
    assert new.prompt == [8, 9, 1] and new.prompt is not base.prompt
    assert new.forked == (0, 1) and base.forked is None


def test_changing_a_fork_leaves_its_parent_alone():
    g = Group("g", "p", [7])
    (base,) = g.start(1)
    base.segments = [Segment([1, 2])]
    first, second = g.fork(base, 2, 2)
    first.segments[0].trained = True
    first.context.append(1)
    assert not second.segments[0].trained
    assert base.context == []


def test_done_lists_the_finished_rollouts_only():
    pruned = Rollout("p", "g", 1, [7], state="pruned")
    g = group_of(finished(1.0), pruned, Rollout("p", "g", 2, [7], state="running"))
    assert [r.slot for r in g.done()] == [0]


def test_a_group_is_settled_when_nothing_runs_and_idle_when_everything_ended():
    g = group_of(finished(1.0), Rollout("p", "g", 1, [7], state="paused"))
    assert g.settled and not g.idle
    g.rollouts[1].state = "pruned"
    assert g.settled and g.idle
    g.rollouts[1].state = "parked"
    assert not g.settled and not g.idle


def test_a_missing_reward_is_nan_and_does_not_count_in_the_success_rate():
    g = group_of(finished(None), finished(math.nan), finished(1.0), finished(0.0))
    assert [math.isnan(r) for r in g.rewards()] == [True, True, False, False]
    assert g.success_rate() == 0.5


def test_success_rate_weighs_survivors_by_their_propensity():
    # Of 4 correct and 4 wrong rollouts the pruner kept half the wrong ones: 2 wrong survivors stand for 4.
    survivors = [finished(1.0) for _ in range(4)] + [finished(0.0, propensity=0.5) for _ in range(2)]
    assert group_of(*survivors).success_rate() == pytest.approx(0.5)


def test_success_rate_counts_rewards_above_the_threshold():
    g = group_of(finished(0.4), finished(0.6))
    assert (g.success_rate(), g.success_rate(above=0.5), g.success_rate(above=0.6)) == (1.0, 0.5, 0.0)


def test_success_rate_without_a_scorable_rollout_is_none():
    assert group_of(finished(None)).success_rate() is None
    assert Group("g", "p", [7]).success_rate() is None


def a_full_group():
    g = Group("g", "p", [7], extras={"solution": [1, 2]}, planned=True, fresh=False)
    (r,) = g.start(1)
    r.segments = [Segment([1], "hint"), Segment([2, 3], logp=[-1.0, -2.0], version=4, turn=1, top=top([2, 8], [3, 9]))]
    r.components, r.extras, r.propensity = {"correct": 1.0}, {"score": torch.ones(2)}, 0.25
    r.finish("eos")
    return g


def test_a_group_survives_being_made_plain_and_saved(tmp_path):
    g = a_full_group()
    torch.save(g.to_plain(), tmp_path / "group.pt")
    back = Group.from_plain(torch.load(tmp_path / "group.pt", weights_only=True))
    assert torch.equal(back.rollouts[0].extras.pop("score"), g.rollouts[0].extras.pop("score"))
    assert back.rollouts[0].segments[1].top[0].tolist() == [[2, 8], [3, 9]]
    assert back == g


def test_a_plain_group_shares_nothing_with_its_group():
    g = a_full_group()
    saved = g.to_plain()
    restored = Group.from_plain(saved)
    g.rollouts[0].segments[1].tokens.append(9)
    g.rollouts[0].extras["score"].zero_()
    saved["rollouts"][0]["segments"][0]["tokens"].append(9)
    saved["extras"]["solution"].append(9)
    assert restored.rollouts[0].tokens == [1, 2, 3]
    assert restored.extras == {"solution": [1, 2]}
    assert restored.rollouts[0].extras["score"].tolist() == [1.0, 1.0]


def test_rollouts_and_segments_can_be_made_plain_by_themselves():
    r = a_full_group().rollouts[0]
    r.extras = {}
    assert Rollout.from_plain(r.to_plain()) == r
    assert Segment.from_plain(r.segments[1].to_plain()) == r.segments[1]
