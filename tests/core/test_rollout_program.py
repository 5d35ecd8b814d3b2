"""The rollout program: which part is asked what, when, and what becomes of the groups.

Parts and host are small: prompts "p0", "p1", ... on the table host, whose rollouts have scripted lengths and rewards.
"""

from dataclasses import dataclass
from typing import Any

import pytest

from rlx_plugins import (
    Abort,
    Allocator,
    ConfigError,
    Context,
    Forward,
    Generate,
    Group,
    Hint,
    Parts,
    Pruner,
    Replay,
    Rollout,
    Sampler,
    Segment,
    Temperature,
    drive,
    param,
    rollout_program,
)
from rlx_plugins.core.kinds import ROLLOUT_KINDS, Advantage
from rlx_plugins.hosts.table import TableHost


class Run:
    """One step of the program: its groups, the operations it yielded, the host that executed them."""

    def __init__(self, *parts, prompts=4, lengths=lambda r: 2, reward=lambda r: float(r.slot % 2), **context):
        self.host = TableHost(prompts, lengths=lengths, score=lambda r: (reward(r), {}))
        self.parts = Parts({kind: [p for p in parts if p.kind == kind] for kind in (*ROLLOUT_KINDS, "advantage")})
        settings = {"groups": 2, "group_size": 2, "max_tokens": 8, "offered": list(self.host.prompts)} | context
        self.ctx = Context(0, 10, prompts=self.host.prompts, columns=self.host.columns, **settings)
        self.operations: list[Any] = []
        self.groups = drive(rollout_program(self.parts, self.ctx), self.execute)

    def execute(self, operation):
        self.operations.append(operation)
        return self.host.execute(operation)

    @property
    def prompts(self):
        return [g.prompt_key for g in self.groups]


@dataclass
class Named(Sampler):
    """Draws the given keys, in order, until none is left."""

    kind, name = "sampler", "named"
    keys: tuple = param(())
    refuse: tuple = param(())

    def __post_init__(self):
        super().__post_init__()
        self.left, self.asked, self.told = list(self.keys), [], []

    def draw(self, n, ctx):
        self.asked.append(n)
        drawn, self.left = self.left[:n], self.left[n:]
        return drawn

    def accept(self, group, ctx):
        return group.prompt_key not in self.refuse

    def observe(self, groups, ctx):
        self.told += groups


@dataclass
class Refilling(Named):
    refills = True


@dataclass
class Rounds(Allocator):
    """`rounds` rounds of `size` rollouts; `waits` makes it rank all groups of the step."""

    kind, name = "allocator", "rounds"
    rounds: int = 2
    size: int = 1
    waits: bool = False

    def __post_init__(self):
        super().__post_init__()
        self.scope = "batch" if self.waits else "group"
        self.idle: list[set[str]] = []

    def more(self, idle, ctx):
        self.idle.append({g.prompt_key for g in idle})
        return [r for g in idle if len(g.rollouts) < self.rounds * self.size for r in g.start(self.size)]


@dataclass
class Watching(Pruner):
    """Looks at given lengths and does to each paused rollout what `act` says."""

    kind, name = "pruner", "watching"
    at: Any = None
    act: Any = None
    stop_at: int | None = None
    brings: Any = ()

    def __post_init__(self):
        super().__post_init__()
        self.looked, self.closed, self.told = [], [], []

    def intake(self, need, ctx):
        return list(self.brings), need

    def pause(self, ctx):
        return self.at

    def look(self, groups, ctx):
        for g in groups:
            paused = [r for r in g.rollouts if r.state == "paused"]
            self.looked.append((g.prompt_key, [len(r) for r in paused]))
            for r in paused:
                if self.act:
                    self.act(g, r)

    def enough(self, ready, ctx):
        return self.stop_at is not None and len(ready) >= self.stop_at

    def close(self, left, ctx):
        self.closed = list(left)

    def observe(self, groups, ctx):
        self.told += groups


def held(key="p3", state="finished", fresh=False, tokens=2):
    """A group of an earlier step with one rollout."""
    g = Group(f"{key}#old", key, [103], fresh=fresh, planned=True)
    (r,) = g.start(1)
    r.segments, r.state, r.reward = [Segment([1] * tokens, version=0)], state, 1.0
    r.max_tokens = 8
    return g


# ---- order of the hooks


def test_every_hook_is_called_in_its_order():
    called = []

    def note(hook, result=None):
        def method(self, *arguments):
            called.append(f"{self.kind}.{hook}")
            return result(*arguments) if result else None

        return method

    def start_two(idle, ctx):
        return [r for g in idle if not g.rollouts for r in g.start(2)]

    answers = {
        "intake": lambda need, ctx: ([], need),
        "draw": lambda n, ctx: ["p0"],
        "accept": lambda group, ctx: True,
        "pause": lambda ctx: 1,
        "enough": lambda ready, ctx: False,
        "allocator.more": start_two,
        "hint.more": lambda idle, ctx: [],
    }
    parts = []
    for protocol in (Sampler, Allocator, Hint, Temperature, Replay, Pruner, Advantage):
        kind = protocol.__name__.lower()
        asked = set(protocol.must) | set(protocol.may) - {"__call__", "in_loss"}
        hooks = {hook: note(hook, answers.get(f"{kind}.{hook}", answers.get(hook))) for hook in asked}
        parts.append(dataclass(type(protocol.__name__, (protocol,), {**hooks, "kind": kind, "name": "noting"}))())

    Run(*parts, groups=1)

    assert called == [
        "replay.intake",
        "pruner.intake",
        "allocator.intake",
        "sampler.draw",
        "allocator.more",
        "hint.more",
        "hint.prepare",
        "temperature.prepare",
        "replay.prepare",
        "pruner.enough",
        "pruner.pause",
        "pruner.look",
        "pruner.enough",
        "pruner.pause",
        "allocator.more",
        "hint.more",
        "allocator.complete",
        "replay.complete",
        "sampler.accept",
        "pruner.close",
        "hint.annotate",
        "advantage.annotate",
        "sampler.observe",
        "allocator.observe",
        "hint.observe",
        "temperature.observe",
        "replay.observe",
        "pruner.observe",
    ]


# ---- prompts and groups


def test_without_parts_the_offered_prompts_get_group_size_rollouts_each():
    run = Run()
    assert run.prompts == ["p0", "p1"]
    assert [[(r.slot, r.state, r.reward) for r in g.rollouts] for g in run.groups] == [
        [(0, "finished", 0.0), (1, "finished", 1.0)]
    ] * 2


def test_a_prompt_drawn_twice_makes_two_groups():
    run = Run(Named(("p1", "p1")))
    assert run.prompts == ["p1", "p1"]
    assert len({g.id for g in run.groups}) == 2
    assert all(r.group == g.id for g in run.groups for r in g.rollouts)
    assert sum(len(g.done()) for g in run.groups) == 4


def test_a_group_starts_with_the_columns_of_its_prompt():
    assert Run().groups[0].extras["domain"] == 0


def test_the_context_lists_every_group_started():
    run = Run(Named(("p2", "p0")))
    assert [g.prompt_key for g in run.ctx.started] == ["p2", "p0"]


def test_a_sampler_naming_a_prompt_that_does_not_exist_is_refused():
    with pytest.raises(ConfigError, match="sampler named named a prompt that does not exist: 'p99'"):
        Run(Named(("p99",)))


def test_a_data_loader_offering_a_prompt_that_does_not_exist_is_refused():
    with pytest.raises(ConfigError, match="the host's data loader named a prompt that does not exist: 'p99'"):
        Run(offered=["p99"])


def test_a_sampler_that_draws_nothing_ends_the_step_without_groups():
    run = Run(Named(()))
    assert run.groups == []
    assert run.operations == []


def test_a_sampler_with_fewer_prompts_than_wanted_gives_a_smaller_batch():
    assert Run(Named(("p1",))).prompts == ["p1"]


def test_the_batch_is_in_the_order_the_groups_came_in_not_in_that_of_completion():
    run = Run(lengths=lambda r: 5 if r.prompt_key == "p0" else 2)
    assert run.prompts == ["p0", "p1"]


# ---- accept and refill


def test_a_refused_group_is_replaced_when_the_sampler_refills():
    sampler = Refilling(("p0", "p1", "p2"), refuse=("p0",))
    run = Run(sampler)
    assert run.prompts == ["p1", "p2"]
    assert sampler.asked == [2, 1]


def test_a_refused_group_is_not_replaced_otherwise():
    sampler = Named(("p0", "p1", "p2"), refuse=("p0",))
    assert Run(sampler).prompts == ["p1"]
    assert sampler.asked == [2]


def test_refilling_ends_when_the_sampler_has_nothing_left():
    sampler = Refilling(("p0", "p1", "p2"), refuse=("p0", "p1", "p2"))
    assert Run(sampler).groups == []
    assert sampler.asked == [2, 2, 2]


def test_an_allocator_that_refills_is_asked_again_for_what_is_missing():
    @dataclass
    class Screening(Rounds):
        refills = True

        def intake(self, need, ctx):
            asked.append(need)
            return [], need

    asked = []
    run = Run(Screening(rounds=1, size=2), Named(("p0", "p1", "p2"), refuse=("p1",)))
    assert asked == [2, 1]
    assert run.prompts == ["p0", "p2"]


def test_prompts_of_the_data_loader_are_offered_once():
    @dataclass
    class Emptying(Rounds):
        refills = True

        def complete(self, group, ctx):
            if group.prompt_key == "p0":
                group.rollouts = []

    assert Run(Emptying(rounds=1, size=2)).prompts == ["p1", "p2"]


def test_controllers_are_told_refused_groups_too():
    sampler = Refilling(("p0", "p1", "p2"), refuse=("p0",))
    Run(sampler)
    assert [g.prompt_key for g in sampler.told] == ["p0", "p1", "p2"]


def test_prompts_named_beyond_the_request_run_until_enough_groups_are_ready():
    @dataclass
    class Generous(Named):
        def draw(self, n, ctx):
            return ["p0", "p1", "p2"]

    pruner = Watching()
    run = Run(Generous(), pruner, lengths=lambda r: 6 if r.prompt_key == "p1" else 2)
    assert run.prompts == ["p0", "p2"]
    assert [(g.prompt_key, [r.state for r in g.rollouts]) for g in pruner.closed] == [("p1", ["parked", "parked"])]


# ---- rounds, barriers and ticks


def test_groups_move_on_alone_so_that_rounds_of_different_groups_overlap():
    def lengths(r):  # each group has one long and one short round
        return 6 if r.slot == (r.prompt_key == "p1") else 2

    alone = Run(Rounds(waits=False), lengths=lengths)
    together = Run(Rounds(waits=True), lengths=lengths)
    assert (alone.host.engine.ticks, together.host.engine.ticks) == (8, 12)
    assert [g.rewards() for g in alone.groups] == [g.rewards() for g in together.groups]


def test_a_batch_scope_allocator_is_asked_once_every_row_of_the_step_has_ended():
    allocator = Rounds(waits=True)
    run = Run(allocator, lengths=lambda r: 6 if r.prompt_key == "p1" else 2)
    assert allocator.idle == [{"p0", "p1"}] * 3
    assert [op.until for op in run.operations] == ["all", "all"]


def test_a_batch_scope_allocator_may_come_back_to_a_group_it_passed_over():
    @dataclass
    class Alternating(Allocator):
        kind, name, scope = "allocator", "alternating", "batch"

        def more(self, idle, ctx):
            rounds = max(len(g.rollouts) for g in idle)
            chosen = {0: idle, 1: idle[:1], 2: idle[1:]}.get(rounds, [])
            return [r for g in chosen for r in g.start(1 if rounds < 2 else 2)]

    assert [len(g.rollouts) for g in Run(Alternating()).groups] == [2, 3]


def test_a_batch_scope_allocator_waits_for_rows_that_stand_at_a_pause():
    allocator = Rounds(waits=True)
    Run(allocator, Watching(at=4), lengths=lambda r: 6 if r.prompt_key == "p1" else 2)
    assert allocator.idle == [{"p0", "p1"}] * 3


def test_an_allocator_that_plans_nothing_leaves_no_group():
    assert Run(Rounds(rounds=0)).groups == []


def test_a_hint_adds_a_second_wave_to_the_groups_the_allocator_is_done_with():
    @dataclass
    class Helping(Hint):
        kind, name = "hint", "helping"

        def more(self, idle, ctx):
            failed = [g for g in idle if not any(g.rewards()) and not g.extras.get("helped")]
            for g in failed:
                g.extras["helped"] = True
            return [r for g in failed for r in g.start(1)]

        def prepare(self, new, groups, ctx):
            for r in new:
                if groups[r.group].extras.get("helped"):
                    r.context, r.tag = [9], "helped"

    run = Run(Rounds(rounds=1, size=2), Helping(), reward=lambda r: float(r.prompt_key == "p1"))
    assert [[(r.wave, r.tag) for r in g.rollouts] for g in run.groups] == [
        [(0, ""), (0, ""), (1, "helped")],
        [(0, ""), (0, "")],
    ]


def test_a_rollout_finished_by_prepare_needs_no_generation():
    @dataclass
    class Reusing(Replay):
        kind, name = "replay", "reusing"

        def prepare(self, new, groups, ctx):
            for r in new:
                r.segments = [Segment([1], "reused")]
                r.finish("eos")
                r.reward = 1.0

    run = Run(Reusing())
    assert run.operations == []
    assert [g.rewards() for g in run.groups] == [[1.0, 1.0]] * 2


def test_a_hook_gets_the_answer_of_the_operation_it_yields():
    answers = []

    @dataclass
    class Asking(Temperature):
        kind, name = "temperature", "asking"

        def prepare(self, new, groups, ctx):
            answers.append((yield Forward(new, "prompt_entropy")))

    Run(Asking())
    assert [len(a) for a in answers] == [4]


def test_an_allocator_may_do_without_the_last_rows_of_a_wave():
    @dataclass
    class Impatient(Allocator):
        kind, name, scope, finish_share = "allocator", "impatient", "batch", 0.5

        def more(self, idle, ctx):
            return [r for g in idle if not g.rollouts for r in g.start(3)]

    run = Run(Impatient(), lengths=lambda r: 1 + 2 * r.slot, max_tokens=9)
    assert [type(o).__name__ for o in run.operations] == ["Generate", "Abort"]
    assert [[(r.state, len(r)) for r in g.rollouts] for g in run.ctx.started] == [
        [("finished", 1), ("finished", 3), ("pruned", 3)]
    ] * 2
    assert [len(g.done()) for g in run.groups] == [2, 2]


def test_an_allocator_may_ask_the_policy_before_it_answers():
    answers = []

    @dataclass
    class Asking(Allocator):
        kind, name = "allocator", "asking"

        def more(self, idle, ctx):
            answers.append((yield Forward([r for g in idle for r in g.rollouts], "entropy")))
            return [r for g in idle if len(g.rollouts) < 2 for r in g.start(1)]

    run = Run(Asking(), groups=1, offered=["p0"])
    assert [len(g.rollouts) for g in run.groups] == [2]
    assert [[len(row) for row in rows] for rows in answers] == [[], [2], [2, 2]]


# ---- replay


def test_groups_brought_by_replay_take_the_place_of_prompts_to_start():
    @dataclass
    class Bringing(Replay):
        kind, name = "replay", "bringing"

        def intake(self, need, ctx):
            return [held()], need - 1

    sampler = Named(("p0", "p1"))
    run = Run(Bringing(), sampler)
    assert sampler.asked == [1]
    assert run.prompts == ["p3", "p0"]


def test_a_group_of_an_earlier_step_is_neither_edited_again_nor_observed():
    edited, told = [], []

    @dataclass
    class Bringing(Replay):
        kind, name = "replay", "bringing"

        def intake(self, need, ctx):
            return [held()], need - 1

        def complete(self, group, ctx):
            edited.append(group.prompt_key)

        def observe(self, groups, ctx):
            told.extend(g.prompt_key for g in groups)

    Run(Bringing())
    assert (edited, told) == (["p0"], ["p0"])


def test_rows_added_to_the_training_group_are_not_shown_to_controllers():
    told = []

    @dataclass
    class Adding(Replay):
        kind, name = "replay", "adding"

        def complete(self, group, ctx):
            group.rollouts.append(held().rollouts[0])

        def observe(self, groups, ctx):
            told.extend(len(g.rollouts) for g in groups)

    run = Run(Adding())
    assert [len(g.rollouts) for g in run.groups] == [3, 3]
    assert told == [2, 2]


# ---- pauses, pruning, forks


def test_rows_pause_at_each_length_a_pruner_names():
    pruner = Watching(at=[2, 4])
    Run(pruner, groups=1, lengths=lambda r: 3 if r.slot == 0 else 6)
    assert pruner.looked == [("p0", [2, 2]), ("p0", [4])]


def test_the_nearest_pause_of_several_pruners_comes_first():
    late, early = Watching(at=4), Watching(at=2)
    Run(late, early, groups=1, lengths=lambda r: 6)
    assert late.looked == early.looked == [("p0", [2, 2]), ("p0", [4, 4])]


def test_pruned_rollouts_stop_and_take_no_part():
    def drop_first(group, r):
        if r.slot == 0:
            r.state = "pruned"

    run = Run(Watching(at=2, act=drop_first), lengths=lambda r: 6)
    assert [[r.slot for r in g.done()] for g in run.groups] == [[1], [1]]
    assert [len(r) for r in run.groups[0].rollouts] == [2, 6]


def test_a_group_without_survivors_is_observed_but_not_trained():
    pruner = Watching(at=2, act=lambda group, r: setattr(r, "state", "pruned"))
    run = Run(pruner, groups=1, lengths=lambda r: 6)
    assert run.groups == []
    assert [g.prompt_key for g in pruner.told] == ["p0"]


def test_a_look_may_fork_and_the_forks_go_on_from_the_prefix():
    def fork(group, r):
        if r.slot == 0 and len(group.rollouts) == 2:
            group.fork(r, at=1, n=1)

    run = Run(Watching(at=2, act=fork), groups=1, lengths=lambda r: 4)
    new = run.groups[0].rollouts[2]
    assert (new.state, new.tag, len(new)) == ("finished", "fork:0@1", 4)
    assert new.tokens[:1] == run.groups[0].rollouts[0].tokens[:1]
    assert [s.trained for s in new.segments] == [False, True]


def test_rollouts_parked_by_a_look_wait_for_a_later_step():
    def park(group, r):
        if group.prompt_key == "p0":
            r.state = "parked"

    pruner = Watching(at=2, act=park)
    run = Run(pruner, lengths=lambda r: 6)
    assert run.prompts == ["p1"]
    assert [(g.prompt_key, [len(r) for r in g.rollouts]) for g in pruner.closed] == [("p0", [2, 2])]


def test_parked_rollouts_that_are_brought_back_go_on_where_they_stopped():
    brought = held(state="parked", fresh=True)
    brought.planned = False
    run = Run(Watching(brings=(brought,)), lengths=lambda r: 5)
    assert run.prompts[0] == "p3"
    assert run.groups[0].rollouts[0].tokens[:2] == [1, 1]
    assert len(run.groups[0].rollouts[0]) == 5


def test_ending_the_phase_aborts_what_runs_and_hands_it_to_close():
    pruner = Watching(stop_at=1)
    run = Run(pruner, lengths=lambda r: 2 if r.prompt_key == "p1" else 6)
    assert run.prompts == ["p1"]
    assert isinstance(run.operations[-1], Abort)
    assert [[(r.state, r.stop, len(r)) for r in g.rollouts] for g in pruner.closed] == [[("parked", "aborted", 2)] * 2]


def test_groups_that_finish_in_the_same_instant_beyond_the_need_reach_close():
    @dataclass
    class Generous(Named):
        def draw(self, n, ctx):
            return ["p0", "p1", "p2"]

    pruner = Watching()
    run = Run(Generous(), pruner)
    assert run.prompts == ["p0", "p1"]
    assert [g.prompt_key for g in pruner.closed] == ["p2"]
    assert [g.prompt_key for g in pruner.told] == ["p0", "p1", "p2"]


def test_annotate_sees_the_groups_of_the_batch_only():
    seen = []

    @dataclass
    class Annotating(Advantage):
        kind, name = "advantage", "annotating"

        def annotate(self, groups, ctx):
            (logp,) = yield Forward([groups[0].rollouts[0]], "logp")
            groups[0].rollouts[0].extras["first_logp"] = logp[0]
            seen.extend(g.prompt_key for g in groups)

    run = Run(Annotating(), Named(("p0", "p1"), refuse=("p0",)))
    assert seen == ["p1"]
    assert run.groups[0].rollouts[0].extras["first_logp"] < 0


# ---- the context


def test_uniform_draws_depend_on_name_keys_step_and_seed_and_not_on_order():
    def ctx(step=0, seed=0):
        return Context(step, 1, 1, 1, 1, {}, seed=seed)

    base = ctx().uniform("a/x", "p0")
    assert 0 <= base < 1
    other = ctx()
    other.uniform("a/y")
    assert other.uniform("a/x", "p0") == base
    different = {ctx().uniform("a/x", "p1"), ctx().uniform("a/z", "p0"), ctx(1).uniform("a/x", "p0")}
    assert len(different | {ctx(seed=1).uniform("a/x", "p0"), base}) == 5


def test_injected_values_replace_draws():
    ctx = Context(0, 1, 1, 1, 1, {}, injected={("a/x", "p0"): 0.25})
    assert ctx.uniform("a/x", "p0") == 0.25
    assert ctx.uniform("a/x", "p1") != 0.25


def test_drive_returns_what_the_program_returns_and_passes_results_back():
    def program():
        first = yield Generate([])
        second = yield Abort([Rollout("p", "g", 0, [])])
        return [first, second]

    assert drive(program(), lambda operation: type(operation).__name__) == ["Generate", "Abort"]
