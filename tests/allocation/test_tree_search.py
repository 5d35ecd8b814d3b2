"""Allocators that grow a tree from finished rollouts: ELPO's bisection, DATPO's sentences, EHPO's transitions."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import rlx_plugins as rlx
from rlx_plugins.allocation._steps import starts_after_tools
from rlx_plugins.allocation.ehpo import BRANCHES
from rlx_plugins.hosts.table import BAD, CALL, GOOD, PROFILE, TableHost, TableTrainer
from rlx_plugins.testing import evaluate

ENTROPY = st.floats(0, 2).map(lambda x: round(x, 2))


def run(config, calls=0.0, **settings):
    """A step on a policy that calls its tool the more often the larger `calls` is."""
    host = TableHost(24, turns=5)
    with torch.no_grad():
        host.policy.theta[..., CALL] += calls
    host.engine.load(host.policy.theta, version=0)
    trainer = TableTrainer(config, host=host, **{"groups": 12, "max_tokens": 16} | settings)
    ctx = trainer.context()
    return trainer, ctx, trainer.rollouts(ctx)


def forks(ctx):
    """(group, fork, the rollout it was forked from, after how many tokens) of every fork of a step."""
    for g in ctx.started:
        rows = {r.slot: r for r in g.rollouts}
        for r in g.rollouts:
            if r.tag:
                slot, at = r.forked
                yield g, r, rows[slot], at


# ---- elpo


def elpo(rewards, after, outcomes, start=None, **params):
    inputs = {
        "root_rewards": rewards,
        "tool_entropy": after,
        "root_entropy": start or [0.0] * len(rewards),
        "branch_outcomes": outcomes,
    }
    return evaluate("allocator", "elpo", inputs, params)


@settings(max_examples=80, deadline=None)
@given(
    st.integers(1, 12).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n - 1))), st.lists(ENTROPY, min_size=12)
)
def test_bisection_finds_the_first_failing_step_in_few_rounds(case, entropy):
    steps, first = case
    outcomes = [[[float(m < first)] * 3 for m in range(steps)]]
    out = elpo([0.0], [entropy[:steps]], outcomes, n_total=99)
    assert out["critical_step"] == {0: first}
    assert len(out["branches"]) <= math.ceil(math.log2(steps)) if steps > 1 else out["branches"] == []
    assert all(1 <= k <= 3 and any_ == (m < first) for _, m, k, any_ in out["branches"])
    assert out["unused"] == 98 - sum(k for *_, k, _ in out["branches"])


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(ENTROPY, max_size=5), min_size=1, max_size=4), st.integers(0, 8), st.randoms())
def test_the_budget_holds_and_the_search_repeats(entropies, extra, random):
    outcomes = [[[float(random.random() < 0.4) for _ in range(3)] for _ in row] for row in entropies]
    n = len(entropies)
    out = elpo([0.0] * n, entropies, outcomes, n_total=n + extra)
    assert sum(k for *_, k, _ in out["branches"]) + out["unused"] == extra
    assert out == elpo([0.0] * n, entropies, outcomes, n_total=n + extra)


def test_a_step_of_rising_entropy_gets_more_continuations():
    part = rlx.create("allocator", "elpo")
    assert [part.continuations(x) for x in (-9.0, 0.0, math.nan, 9.0)] == [1, 2, 2, 3]


def test_the_search_that_the_budget_ends_finds_nothing():
    out = elpo([0.0], [[0.5] * 8], [[[0.0] * 3] * 8], n_total=4)
    assert (out["critical_step"], out["unused"]) == ({}, 0) and len(out["branches"]) == 1


def test_successes_unscorable_and_empty_roots_are_not_searched():
    out = elpo([1.0, None, 0.0], [[0.1, 0.2], [0.9, 0.9], []], [[], [], []], n_total=9)
    assert out == {"branches": [], "critical_step": {}, "unused": 6}
    assert elpo([1.0], [[0.5]], [[]], n_total=9, spend_rest=True)["unused"] == 0


def test_one_step_is_the_critical_one_at_no_cost():
    assert elpo([0.0], [[0.5]], [[]], n_total=2) == {"branches": [], "critical_step": {0: 0}, "unused": 1}
    assert elpo([0.0], [[0.5]], [[]], n_total=1)["critical_step"] == {}


def test_elpo_in_a_run_resamples_failed_rollouts_from_their_steps():
    config = {"method": {"name": "elpo", "search": True, "total_rollouts": 8, "first_wave": 3}}
    trainer, ctx, batch = run(config, calls=2.5)
    found = list(forks(ctx))
    assert len(found) > 5 and max(len(g.rollouts) for g in ctx.started) <= 8
    for _, r, root, at in found:
        assert root.reward < 1 and root.slot < 3 and at in [0, *starts_after_tools(root)]
        assert r.tokens[:at] == root.tokens[:at]
    critical = batch.critical_turn
    assert (critical >= 0).sum() == ctx.metrics["allocator/elpo_found"] > 0
    assert bool((batch.rewards[critical >= 0] < 1).all())
    turns = torch.where(batch.turn_ids >= 0, batch.turn_ids, -1).max(1).values
    assert bool((critical <= turns).all())
    loss = rlx.prepare(trainer.parts, batch).batch
    assert bool(loss.advantages.isfinite().all())


def test_elpo_is_refused_where_no_tools_are_called():
    host = rlx.HostProfile("any", PROFILE.signals | {"critical_turn"}, PROFILE.capabilities - {"tools"})
    with pytest.raises(rlx.ConfigError, match="allocator elpo.*'tools'"):
        rlx.build({"method": {"name": "elpo", "search": True}}, host)
    rlx.build({"method": "elpo"}, host)
    for params, name in (({"first_wave": 17}, "first_wave"), ({"x_min": 4}, "x_min")):
        with pytest.raises(rlx.ConfigError, match=f"elpo.{name}"):
            rlx.create("allocator", "elpo", **params)


# ---- datpo

BASE = st.lists(
    st.tuples(st.sampled_from([0, 0.5, 1, None]), st.lists(ENTROPY, min_size=1, max_size=8)), min_size=1, max_size=4
)


def datpo(base, starts=None, **params):
    entropy = [e for _, e in base]
    starts = starts or [list(range(0, len(e), 2)) for e in entropy]
    inputs = {"base_rewards": [r for r, _ in base], "entropy": entropy, "sentence_starts": starts}
    return evaluate("allocator", "datpo", inputs, params)


@settings(max_examples=80, deadline=None)
@given(BASE, st.integers(0, 4), st.integers(1, 4))
def test_forks_are_the_most_uncertain_sentences_and_bounded(base, K_max, B_max):
    out = datpo(base, K_max=K_max, B_max=B_max)
    scored = [r for r, _ in base if r is not None]
    if not scored:
        assert math.isnan(out["V_root"]) and out["n_new"] == 0
        return
    value = sum(scored) / len(scored)
    assert (out["K"], out["B"]) == (math.ceil(K_max * (1 - value) - 1e-9), math.ceil(B_max * (1 - value) - 1e-9))
    assert out["n_new"] == out["B"] * sum(map(len, out["forks"])) <= len(base) * K_max * B_max
    for (_, entropy), chosen in zip(base, out["forks"], strict=True):
        starts = list(range(0, len(entropy), 2))
        assert chosen == sorted(set(chosen) & set(starts)) and len(chosen) == min(out["K"], len(starts))
        score = {a: sum(entropy[a : a + 2]) / len(entropy[a : a + 2]) for a in starts}
        others = [score[a] for a in starts if a not in chosen]
        assert not chosen or not others or min(score[a] for a in chosen) >= max(others) - 1e-12
    scaled = [(r, [4 * e for e in entropy]) for r, entropy in base]
    assert datpo(scaled, K_max=K_max, B_max=B_max)["forks"] == out["forks"]


def test_a_solved_prompt_is_not_forked_and_an_empty_rollout_neither():
    assert datpo([(1, [0.5]), (1, [0.1])])["n_new"] == 0
    assert datpo([(0, [0.5]), (0, [])])["forks"] == [[0], []]


def test_datpo_in_a_run_resamples_sentences_of_hard_prompts():
    config = {"method": {"name": "datpo", "first_wave": 2, "max_forks": 2, "max_branches": 2, "sentence_ends": [BAD]}}
    trainer, ctx, batch = run(config)
    for _, r, parent, at in forks(ctx):
        assert r.tokens[:at] == parent.tokens[:at] and (at == 0 or parent.tokens[at - 1] == BAD)
        assert parent.slot < 2
    sizes = {len(g.rollouts) for g in ctx.started}
    assert min(sizes) == 2 and max(sizes) > 4
    for g in ctx.started:
        assert (len(g.rollouts) == 2) == all(r.reward == 1 for r in g.rollouts[:2])
    assert bool(rlx.prepare(trainer.parts, batch).batch.advantages.isfinite().all())


def test_datpo_needs_to_know_where_sentences_end():
    with pytest.raises(rlx.ConfigError, match="datpo.sentence_ends"):
        rlx.create("allocator", "datpo", sentence_ends=())
    with pytest.raises(rlx.ConfigError, match="datpo.reward_min"):
        rlx.create("allocator", "datpo", sentence_ends=[1], reward_min=2)


# ---- ehpo

EVENT = st.tuples(st.integers(1, 9), ENTROPY, ENTROPY, st.floats(0, 0.999))
TRUNKS = st.lists(st.lists(EVENT, max_size=3, unique_by=lambda e: e[0]).map(sorted), min_size=1, max_size=4)


def ehpo(trunks, **params):
    rows = [[{"pos": p, "h_start": a, "h_end": b, "u": u} for p, a, b, u in row] for row in trunks]
    return evaluate("allocator", "ehpo", {"trunks": rows}, {"n_trunk": len(trunks), **params})


@settings(max_examples=80, deadline=None)
@given(TRUNKS, st.integers(0, 6), st.integers(1, 3), st.integers(0, 3))
def test_branches_stay_within_the_group_and_the_trunks_bound(trunks, extra, branches, most):
    out = ehpo(trunks, n_group=len(trunks) + extra, branches=branches, max_branch_per_trunk=most)
    assert sum(k for *_, k in out["branches"]) + len(trunks) + out["from_root"] == out["total"] == len(trunks) + extra
    assert [at for _, at, _ in out["probabilities"]] == sorted(at for row in trunks for at, *_ in row)
    for t in range(len(trunks)):
        assert sum(k for trunk, _, k in out["branches"] if trunk == t) <= most
    for t, at, p in out["probabilities"]:
        _, start, end, _ = next(e for e in trunks[t] if e[0] == at)
        assert 0 <= p <= 1 and p == pytest.approx(min(max(0.5 + (end - start) / math.log(151936), 0), 1))


def test_probabilities_of_one_and_zero_and_unknown_entropies():
    trunks = [[(3, 0.2, 0.9, 0.99), (5, 0.0, 0.0, 0.0)], [(4, 1.0, 0.0, 0.5)]]
    assert ehpo(trunks, base=1, scale=0)["branches"] == [[0, 3, 1], [1, 4, 1], [0, 5, 1]]
    assert ehpo(trunks, base=0, scale=0) == {
        "probabilities": [[0, 3, 0.0], [1, 4, 0.0], [0, 5, 0.0]],
        "branches": [],
        "from_root": 6,
        "total": 8,
    }
    assert ehpo([[(3, None, 0.9, 0.1)]])["probabilities"] == [[0, 3, 0.5]]
    assert ehpo([[]], n_group=1)["from_root"] == 0


def rollout(tokens):
    r = rlx.Rollout("p", "g", 0, [], segments=[rlx.Segment(list(tokens))])
    r.finish("eos")
    return r


def test_events_are_the_passages_from_an_easy_to_a_hard_unit():
    part = rlx.create("allocator", "ehpo", easy=[7], hard=[8, 9], window=2)
    entropy = [float(i) for i in range(12)]
    events = part.events(rollout([7, 1, 1, 1, 8, 9, 1, 7, 8, 9, 8, 9]), entropy)
    assert [(e.at, e.start, e.end) for e in events] == [(4, 1.5, 2.5), (8, 7.0, 7.0)]
    assert part.events(rollout([8, 9, 1, 8, 9, 7]), entropy) == [] == part.events(rollout([1, 1]), entropy)


def test_ehpo_in_a_run_branches_before_hard_units():
    config = {"allocator": {"name": "ehpo", "easy": [GOOD], "hard": [BAD], "window": 1}}
    _, ctx, _ = run(config)
    assert {len(g.rollouts) for g in ctx.started} == {8}
    found = list(forks(ctx))
    assert len(found) == ctx.metrics["allocator/ehpo_branches"] > 10
    for _, r, trunk, at in found:
        assert trunk.tokens[at] == BAD and r.tokens[:at] == trunk.tokens[:at]
        assert [t for t in trunk.tokens[:at] if t in (GOOD, BAD)][-1] == GOOD
    told = [b for g in ctx.started for b in g.extras[BRANCHES]]
    assert {b.count for b in told} == {0, 1}


def test_ehpo_needs_marks():
    with pytest.raises(rlx.ConfigError, match="ehpo.easy"):
        rlx.create("allocator", "ehpo", easy=[1], hard=[1])
    with pytest.raises(rlx.ConfigError, match="ehpo.first_wave"):
        rlx.create("allocator", "ehpo", easy=[1], hard=[2], first_wave=9)
