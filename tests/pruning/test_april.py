"""APRIL: generation ends with the last group needed; what is unfinished goes on in the next step."""

from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlx_plugins import Allocator, ConfigError, Context, Parts, Sampler, create, drive, rollout_program
from rlx_plugins.core.config import check_together
from rlx_plugins.hosts.table import TableHost
from rlx_plugins.testing import evaluate

LENGTHS = st.lists(st.lists(st.integers(1, 12), min_size=2, max_size=2), min_size=3, max_size=8)


def april(lengths, **params):
    return evaluate("pruner", "april", {"lengths": lengths}, params)


class Steps:
    """Steps of a rollout program with APRIL and prompts in order, on rows of scripted lengths."""

    def __init__(self, lengths, groups=1, sampler=None, **params):
        self.host = TableHost(len(lengths), lengths=lambda r: lengths[self.host.row[r.prompt_key]][r.slot])
        self.april = create("pruner", "april", **params)
        sampler = sampler or create("sampler", "in_order", repeat=False)
        self.parts = Parts({"sampler": [sampler], "pruner": [self.april]})
        self.groups, self.size, self.at = groups, len(lengths[0]), 0
        self.prompts = dict(self.host.prompts)

    def step(self):
        self.host.engine.load(self.host.policy.theta, version=self.at)
        ctx = Context(self.at, 99, self.groups, self.size, 12, self.prompts, version=self.at)
        self.ctx = ctx
        self.at += 1
        return drive(rollout_program(self.parts, ctx), self.host.execute)


# ---- invariants


@given(lengths=LENGTHS, groups=st.integers(1, 3), extra=st.integers(0, 3), max_tokens=st.sampled_from([5, 64]))
@settings(max_examples=15, deadline=None)
def test_every_group_is_returned_once_and_the_batch_is_full_while_prompts_last(lengths, groups, extra, max_tokens):
    got = april(
        lengths, rollout_groups=groups, over_sampling=groups + extra, steps=len(lengths) + 1, max_tokens=max_tokens
    )
    returned = [s["returned"] for s in got["steps"]]
    assert sorted(g for r in returned for g in r) == list(range(len(lengths)))
    whole = len(lengths) // groups
    assert [len(r) for r in returned[:whole]] == [groups] * whole
    assert got["groups_consumed"] == len(lengths)
    cut = [[g, i] for g, row in enumerate(lengths) for i, n in enumerate(row) if n > max_tokens]
    assert sorted(t for s in got["steps"] for t in s["truncated"]) == cut


@given(lengths=LENGTHS, groups=st.integers(1, 2), extra=st.integers(0, 3), steps=st.integers(1, 4))
@settings(max_examples=15, deadline=None)
def test_no_token_is_lost_or_generated_twice(lengths, groups, extra, steps):
    run = Steps(lengths, groups, over_sampling=(groups + extra) / groups)
    returned = sum(len(r) for _ in range(steps) for g in run.step() for r in g.rollouts)
    kept = [*run.april.parked, *run.april.surplus]
    stored = sum(len(s["tokens"]) for g in kept for r in g["rollouts"] for s in r["segments"])
    assert returned + stored == run.host.engine.generated


@given(lengths=LENGTHS, groups=st.integers(1, 2), extra=st.integers(1, 3))
@settings(max_examples=15, deadline=None)
def test_over_provisioning_never_takes_more_engine_steps_for_the_same_groups(lengths, groups, extra):
    steps = len(lengths) + 1
    plain = april(lengths, rollout_groups=groups, over_sampling=groups, steps=steps)
    more = april(lengths, rollout_groups=groups, over_sampling=groups + extra, steps=steps)
    assert sum(s["ticks"] for s in more["steps"]) <= sum(s["ticks"] for s in plain["steps"])


@given(lengths=LENGTHS, groups=st.integers(1, 3))
@settings(max_examples=10, deadline=None)
def test_without_over_provisioning_the_rollout_is_synchronous(lengths, groups):
    for s in april(lengths, rollout_groups=groups, over_sampling=groups, steps=3)["steps"]:
        assert (s["off_policy_tokens"], s["buffer"], s["surplus"], s["wasted"]) == (0, [], [], 0)


# ---- the phase


def test_parked_groups_are_continued_before_new_prompts_oldest_first():
    got = april([[9], [8], [1], [3], [1]], rollout_groups=1, over_sampling=3, steps=3)
    assert [s["returned"] for s in got["steps"]] == [[2], [3], [4]]
    assert [s["buffer"] for s in got["steps"]] == [
        [[0, [1], 0], [1, [1], 0]],
        [[0, [4], 0], [1, [4], 0]],
        [[0, [5], 0], [1, [5], 0]],
    ]


def test_parked_groups_beyond_what_a_smaller_step_starts_stay_in_front_of_the_line():
    run = Steps([[9], [5], [9], [1], [1], [1], [1]], groups=3, over_sampling=2)
    run.step()
    assert [g["prompt_key"] for g in run.april.parked] == ["p0", "p1", "p2"]
    run.groups = 1
    assert [g.prompt_key for g in run.step()] == ["p1"]
    assert [g["prompt_key"] for g in run.april.parked] == ["p2", "p0"]
    assert run.ctx.started == []


def test_groups_that_complete_in_the_same_instant_are_returned_by_the_next_step_without_a_tick():
    got = april([[3], [3], [3], [5]], rollout_groups=1, over_sampling=3, steps=4)
    assert [s["returned"] for s in got["steps"]] == [[0], [1], [2], [3]]
    assert [s["surplus"] for s in got["steps"]] == [[1, 2], [2], [], []]
    assert [s["ticks"] for s in got["steps"]] == [3, 0, 0, 5]
    assert [s["off_policy_fraction"] for s in got["steps"]] == [0, 1, 1, 0]


def test_surplus_counts_towards_the_groups_wanted_and_the_rest_is_generated():
    got = april([[2], [2], [2], [4], [4], [4], [4]], rollout_groups=2, over_sampling=3, steps=2)
    assert [s["returned"] for s in got["steps"]] == [[0, 1], [2, 3]]
    assert got["steps"][1]["surplus"] == [4, 5]


def test_without_recycling_unfinished_tokens_are_wasted():
    got = april([[2], [9], [2]], rollout_groups=1, over_sampling=2, steps=2, recycle=False)
    assert [s["wasted"] for s in got["steps"]] == [2, 0]
    assert [s["buffer"] for s in got["steps"]] == [[], []]
    assert [s["returned"] for s in got["steps"]] == [[0], [2]]


def test_with_fewer_prompts_than_wanted_the_step_returns_what_there_is():
    got = april([[2], [3]], rollout_groups=3, over_sampling=6, steps=2)
    assert [s["returned"] for s in got["steps"]] == [[0, 1], []]
    assert [s["off_policy_fraction"] for s in got["steps"]] == [0, 0]


def test_a_response_may_carry_tokens_of_more_than_two_policies():
    got = april([[9], [2], [2], [2]], rollout_groups=1, over_sampling=2, steps=4)
    assert got["steps"][3]["returned"] == [0]
    assert got["steps"][3]["max_policies_per_member"] == 4


def test_a_response_cut_at_the_bound_is_not_continued():
    got = april([[9], [6]], rollout_groups=1, over_sampling=2, steps=1, max_tokens=4)
    assert got["steps"][0]["truncated"] == [[0, 0]]
    assert (got["steps"][0]["surplus"], got["steps"][0]["ticks"]) == ([1], 4)


def test_a_finished_member_of_a_parked_group_is_not_generated_again():
    run = Steps([[1, 9], [2, 2], [2, 2]], over_sampling=2)
    run.step()
    (parked,) = run.april.parked
    assert [(r["state"], r["reward"] is not None) for r in parked["rollouts"]] == [
        ("finished", True),
        ("parked", False),
    ]
    before = run.host.engine.generated
    run.step()
    assert run.host.engine.generated - before == 2 + 4


def test_groups_older_than_max_age_are_dropped():
    run = Steps([[12]] + [[1]] * 6, over_sampling=2, max_age=2)
    kept = []
    for _ in range(4):
        run.step()
        kept.append([g["prompt_key"] for g in run.april.parked])
    assert kept == [["p0"], ["p0"], ["p0"], []]


def test_a_parked_group_whose_prompt_is_gone_is_dropped():
    run = Steps([[9], [1], [1], [1]], over_sampling=2)
    run.step()
    assert [g["prompt_key"] for g in run.april.parked] == ["p0"]
    del run.prompts["p0"]
    (group,) = run.step()
    assert group.prompt_key != "p0"
    assert run.april.parked == []


def test_surplus_groups_are_marked_and_observed_once():
    told = []

    @dataclass
    class Telling(Allocator):
        kind, name = "allocator", "telling"

        def more(self, idle, ctx):
            return [r for g in idle if not g.rollouts for r in g.start(2)]

        def observe(self, groups, ctx):
            told.append([g.prompt_key for g in groups])

    run = Steps([[3, 3]] * 4, over_sampling=2)
    run.parts.by_kind["allocator"] = [Telling()]
    run.step()
    (group,) = run.step()
    assert [r.tag for r in group.rollouts] == ["surplus", "surplus"]
    assert told == [["p0", "p1"], []]


def test_a_filter_that_refuses_groups_keeps_the_phase_going():
    @dataclass
    class Filter(Sampler):
        kind, name = "sampler", "filter"
        refills = True

        def __post_init__(self):
            super().__post_init__()
            self.left = [f"p{i}" for i in range(6)]

        def draw(self, n, ctx):
            drawn, self.left = self.left[:n], self.left[n:]
            return drawn

        def accept(self, group, ctx):
            return group.prompt_key == "p4"

    run = Steps([[2, 2]] * 6, sampler=Filter(), over_sampling=2)
    assert [g.prompt_key for g in run.step()] == ["p4"]


@pytest.mark.parametrize(("over_sampling", "groups", "started"), [(1.5, 3, 5), (29 / 7, 7, 29)])
def test_a_fraction_of_groups_is_rounded_up_but_not_a_rounding_error(over_sampling, groups, started):
    run = Steps([[2]] * 30, groups, over_sampling=over_sampling)
    run.step()
    assert len(run.ctx.started) == started


def test_what_is_parked_and_wasted_is_logged():
    run = Steps([[1], [9]], over_sampling=2)
    run.step()
    assert run.ctx.metrics == {
        "pruner/april_parked": 1,
        "pruner/april_surplus": 0,
        "pruner/april_wasted_tokens": 0,
    }


def test_it_is_refused_beside_an_allocator_that_waits_for_every_row():
    @dataclass
    class Ranking(Allocator):
        kind, name = "allocator", "ranking"
        scope = "batch"

        def more(self, idle, ctx):
            return []

    parts = Parts({"allocator": [Ranking()], "pruner": [create("pruner", "april")]})
    with pytest.raises(ConfigError, match="pruner april ends generation early"):
        check_together(parts)


def test_starting_fewer_groups_than_are_wanted_is_refused():
    with pytest.raises(ConfigError, match="april.over_sampling: must be >= 1"):
        create("pruner", "april", over_sampling=0.5)
