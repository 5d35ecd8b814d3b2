"""ARPO's allocator: which rollouts are forked where, and how the budget ends."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import rlx_plugins as rlx
from rlx_plugins.allocation._steps import entropy_from, first_own, starts_after_tokens, starts_after_tools
from rlx_plugins.hosts.table import CALL, PROFILE, TableHost, TableTrainer
from rlx_plugins.testing import evaluate

ENTROPY = st.floats(0, 3).map(lambda x: round(x, 2))
ROOTS = st.lists(st.tuples(ENTROPY, st.lists(ENTROPY, max_size=3)), min_size=1, max_size=4)


def arpo(h_init, h_rounds, **params):
    return evaluate("allocator", "arpo", {"h_init": h_init, "h_rounds": h_rounds}, params)


@settings(max_examples=60, deadline=None)
@given(ROOTS, st.integers(0, 6), st.integers(1, 3), st.booleans())
def test_the_total_is_the_budget_and_children_are_numbered_in_the_order_of_their_making(roots, extra, Z, stochastic):
    h_init, h_rounds = [h for h, _ in roots], [row for _, row in roots]
    out = arpo(h_init, h_rounds, M=len(roots) + extra, Z=Z, stochastic=stochastic)
    assert len(out["branches"]) + len(roots) + out["n_fresh"] == out["total"] == len(roots) + extra
    assert [child for _, child, _ in out["branches"]] == list(range(len(roots), len(roots) + len(out["branches"])))
    rounds = [r for *_, r in out["branches"]]
    assert rounds == sorted(rounds)
    if not stochastic:
        root = {i: i for i in range(len(roots))}
        for parent, child, r in out["branches"]:
            root[child] = root[parent]
            assert h_rounds[root[child]][r] > h_init[root[child]]


@settings(max_examples=40, deadline=None)
@given(ROOTS, st.integers(0, 5))
def test_a_larger_budget_never_removes_an_earlier_branch(roots, extra):
    h_init, h_rounds = [h for h, _ in roots], [row for _, row in roots]
    less = arpo(h_init, h_rounds, M=len(roots) + extra)["branches"]
    more = arpo(h_init, h_rounds, M=len(roots) + extra + 2)["branches"]
    first = {r for *_, r in less}
    for r in sorted(first)[:1]:  # later rounds have more rollouts to fork
        assert [b for b in more if b[2] == r][: len([b for b in less if b[2] == r])] == [b for b in less if b[2] == r]


def test_without_tool_calls_the_rest_starts_from_the_prompt():
    assert arpo([0.4, 0.2], [[], []], M=5) == {"branches": [], "n_fresh": 3, "total": 5}
    assert arpo([0.4, 0.2], [[0.9], [0.9]], M=2) == {"branches": [], "n_fresh": 0, "total": 2}


def test_an_unchanged_entropy_is_no_reason_to_fork():
    assert arpo([0.5], [[0.5]], M=3)["branches"] == []


def test_an_unknown_entropy_never_forks():
    assert arpo([0.5, None], [[None], [0.9]], M=9, alpha=5)["branches"] == []
    assert arpo([0.5], [[None]], M=9, stochastic=True, uniforms=[0.0] * 8)["branches"] == []


def test_a_score_above_the_threshold_forks_at_every_step_until_the_budget_ends():
    out = arpo([1.0], [[0.0, 0.0]], M=4, alpha=0.6, beta=0)
    assert out == {"branches": [[0, 1, 0], [0, 2, 1], [1, 3, 1]], "n_fresh": 0, "total": 4}


def test_up_to_max_forks_at_one_step():
    assert arpo([0.0], [[1.0]], M=9, Z=3)["branches"] == [[0, 1, 0], [0, 2, 0], [0, 3, 0]]


def test_a_failed_draw_uses_up_an_attempt():
    out = arpo([0.5], [[1.0]], M=9, Z=3, stochastic=True, uniforms=[0.55, 0.7, 0.6])  # P = 0.5 + 0.2 * 0.5
    assert out["branches"] == [[0, 1, 0], [0, 2, 0]]


def rollout(*segments):
    r = rlx.Rollout("p", "g", 0, [])
    r.segments = [rlx.Segment(tokens, source) for source, tokens in segments]
    return r


def test_steps_begin_after_tools_or_after_boundary_tokens():
    r = rollout(("hint", [9]), ("policy", [1, 7, 2]), ("tool", [7, 7]), ("policy", [7, 3]), ("tool", [5]))
    assert first_own(r) == 1
    assert starts_after_tools(r) == [6]
    assert starts_after_tokens(r, [7]) == [3, 6, 7]
    entropy = [0.5, 1, 2, 3, math.nan, math.nan, 4, 5, math.nan]
    assert entropy_from(r, entropy, 1, 2) == 3 and entropy_from(r, entropy, 1, 20) == 6
    assert entropy_from(r, entropy, 6, 20) == 9 and math.isnan(entropy_from(r, entropy, None, 20))


def test_entropies_are_sums_over_the_first_tokens_divided_by_that_of_the_vocabulary():
    part = rlx.create("allocator", "arpo", measured_tokens=2, vocabulary_size=8)
    search = part.search(rlx.Group("g", "p", []))
    r = rollout(("policy", [1, 1, 1]), ("tool", [5]), ("policy", [1, 1, 1]))
    part.measure(search, r, [1, 2, 3, math.nan, 4, 5, 6])
    assert search.start == {0: pytest.approx(3 / math.log(8))}
    assert [(s.at, s.entropy) for s in search.steps[0]] == [(4, pytest.approx(9 / math.log(8)))]


def test_a_fork_is_compared_with_the_start_of_its_parent():
    part = rlx.create("allocator", "arpo", measured_tokens=2, boundary_tokens=[7])
    group = rlx.Group("g", "p", [])
    (root,) = group.start(1)
    root.segments = [rlx.Segment([7, 1, 1])]
    root.finish("eos")
    search = part.search(group)
    part.measure(search, root, [0.0, 1.0, 2.0])
    (fork,) = part._forks(group, search, rlx.Context(0, 1, 1, 1, 9, {}))
    fork.segments.append(rlx.Segment([2, 2]))
    fork.finish("eos")
    part.measure(search, fork, [0.0, 9.0, 9.0])
    assert search.start[fork.slot] == search.start[root.slot] != 0
    assert search.steps[fork.slot][0].entropy != search.steps[root.slot][0].entropy


def test_what_it_needs_of_a_host_depends_on_where_steps_end():
    no_tools = rlx.HostProfile("any", PROFILE.signals, PROFILE.capabilities - {"tools"}, {"tools": "it has none"})
    with pytest.raises(rlx.ConfigError, match="allocator arpo.*'tools'.*it has none"):
        rlx.build({"method": "arpo"}, no_tools)
    rlx.build({"method": {"name": "arpo", "boundary_tokens": [7]}}, no_tools)
    with pytest.raises(rlx.ConfigError, match="arpo.first_wave"):
        rlx.create("allocator", "arpo", first_wave=17)
    with pytest.raises(rlx.ConfigError, match="arpo.boundary_tokens"):
        rlx.create("allocator", "arpo", boundary_tokens=())


def run(config):
    """A step on a policy that often calls its tool."""
    host = TableHost(24, turns=4)
    with torch.no_grad():
        host.policy.theta[..., CALL] += 2.5
    host.engine.load(host.policy.theta, version=0)
    trainer = TableTrainer(config, host=host, groups=6, max_tokens=24)
    ctx = trainer.context()
    return trainer, ctx, trainer.rollouts(ctx)


def test_in_a_run_forks_follow_tool_calls_of_raised_entropy_and_train_their_own_tokens_only():
    config = {"method": {"name": "arpo", "total_rollouts": 8, "first_wave": 4, "measured_tokens": 1}}
    trainer, ctx, batch = run(config)
    assert {len(g.rollouts) for g in ctx.started} == {8}
    forks = [(g, r) for g in ctx.started for r in g.rollouts if r.tag.startswith("fork:")]
    assert len(forks) > 5 and ctx.metrics["allocator/arpo_forks"] == len(forks)
    for g, r in forks:
        slot, at = r.forked
        parent = g.rollouts[slot]
        assert r.tokens[:at] == parent.tokens[:at] and at in starts_after_tools(parent)
        if not parent.tag:
            (entropy,) = trainer.host.execute(rlx.Forward([parent], "entropy"))
            assert entropy[at] > entropy[0]
    for i, r in enumerate(batch.rollout):
        own = [s.from_model and not (r.tag and n < r.forked[1]) for n, s in _tokens(r)]
        assert batch.response_mask[i, : len(r)].tolist() == own


def _tokens(r):
    return list(enumerate(s for s in r.segments for _ in s.tokens))


def test_where_tokens_end_steps_no_tool_is_needed():
    part = {"name": "arpo", "total_rollouts": 6, "first_wave": 3, "boundary_tokens": [0], "measured_tokens": 1}
    _, ctx, _ = run({"allocator": part})
    forks = [(g, r) for g in ctx.started for r in g.rollouts if r.tag.startswith("fork")]
    assert forks and all(r.tokens[r.forked[1] - 1] == 0 for _, r in forks)


def test_the_stochastic_rule_draws_the_same_in_every_run():
    own = {"total_rollouts": 6, "first_wave": 3, "measured_tokens": 1, "stochastic": True}
    config = {"allocator": {"name": "arpo", **own}}
    tags = [[r.tag for g in run(config)[1].started for r in g.rollouts] for _ in range(2)]
    assert tags[0] == tags[1] and any(tags[0])
