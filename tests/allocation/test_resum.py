"""ReSum's allocator: which partners are made, where, and what stands at the branch."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import rlx_plugins as rlx
from rlx_plugins.allocation.resum import PLAN
from rlx_plugins.hosts.table import BAD, CALL, GOOD, PROFILE, TableHost, TableTrainer
from rlx_plugins.testing import evaluate

ROOT = st.integers(0, 12).flatmap(
    lambda n: st.tuples(st.just(n), st.lists(st.integers(0, max(0, n - 1)), max_size=3, unique=True).map(sorted))
)


def resum(natural, length, **params):
    return evaluate("allocator", "resum", {"natural_points": natural, "length": length}, params)


@settings(max_examples=80, deadline=None)
@given(st.lists(ROOT, min_size=1, max_size=4), st.integers(1, 5), st.integers(0, 3))
def test_roots_come_first_then_natural_places_once_each_then_artificial_ones(roots, J, min_prefix):
    length, natural = [n for n, _ in roots], [points if n else [] for n, points in roots]
    out = resum(natural, length, J=J, min_prefix=min_prefix)
    plan, trees = out["plan"], len(length)
    assert plan[:trees] == [[t, "root", 0] for t in range(trees)]
    assert len(plan) == out["n_rollouts"] == trees * J
    for t in range(trees):
        partners = [(kind, at) for tree, kind, at in plan[trees:] if tree == t]
        assert len(partners) == J - 1
        used = [at for kind, at in partners if kind == "natural"]
        assert used == natural[t][: J - 1] and [kind for kind, _ in partners][: len(used)] == ["natural"] * len(used)
        for kind, at in partners[len(used) :]:
            if kind == "artificial":
                assert min_prefix <= at < length[t] and at not in natural[t]
            else:
                assert not set(range(min_prefix, length[t])) - set(natural[t])


def test_the_same_draws_give_the_same_plan_and_each_artificial_place_takes_one():
    draws = [0.0, 0.999, 0.5]
    out = resum([[1], []], [4, 6], J=3, draws=draws)
    assert out["plan"][2:] == [[0, "natural", 1], [1, "artificial", 1], [0, "artificial", 3], [1, "artificial", 3]]
    with pytest.raises((StopIteration, RuntimeError)):
        resum([[1], []], [4, 6], J=3, draws=draws[:2])


def test_one_rollout_per_tree_is_no_branching_and_short_roots_start_anew():
    assert resum([[2], []], [5, 5], J=1)["plan"] == [[0, "root", 0], [1, "root", 0]]
    assert resum([[]], [2], J=3, min_prefix=2)["plan"] == [[0, "root", 0]] * 3


def rollout(*segments, max_tokens=64):
    r = rlx.Rollout("p", "g", 0, [], max_tokens=max_tokens)
    r.segments = [rlx.Segment(tokens, source) for source, tokens in segments]
    r.finish("eos")
    return r


def test_natural_points_are_where_the_model_itself_begins_the_phrase():
    part = rlx.create("allocator", "resum", phrase=[7, 8])
    r = rollout(("policy", [7, 8, 1, 7]), ("reused", [8]), ("tool", [7, 8]), ("policy", [3, 7]), ("hint", [8]))
    assert part.natural_points(r) == [0, 3]
    assert part.candidates(r, [0, 3]) == [1, 2, 4, 7, 8]


def test_a_phrase_leaves_the_model_at_least_one_token():
    part = rlx.create("allocator", "resum", phrase=[7, 8])
    assert part.candidates(rollout(("policy", [1] * 6), max_tokens=6), []) == [1, 2, 3]
    assert part.candidates(rollout(("policy", [1] * 6), max_tokens=2), []) == []


def run(**changes):
    config = {"method": {"name": "resum", "phrase": [CALL], "trees": 3, "per_tree": 3, **changes}}
    trainer = TableTrainer(config, host=TableHost(24), groups=8, max_tokens=12)
    ctx = trainer.context()
    return trainer, ctx, trainer.rollouts(ctx)


def test_in_a_run_a_partner_shares_the_prefix_and_differs_by_the_summary():
    trainer, ctx, batch = run()
    kinds = []
    for g in ctx.started:
        assert len(g.rollouts) == 9
        for r, (tree, kind, at) in zip(g.rollouts, g.extras[PLAN], strict=True):
            kinds.append(kind)
            if kind == "root":
                continue
            root = g.rollouts[tree]
            assert r.tokens[:at] == root.tokens[:at] and r.tag == f"fork:{tree}@{at}"
            if kind == "natural":
                assert root.tokens[at] == CALL and r.tokens[at] != CALL and r.tokens[at] in (BAD, GOOD, 2)
            else:
                assert r.tokens[at] == CALL and root.tokens[at] != CALL and len(r) > at + 1
    assert {"natural", "artificial"} <= set(kinds)
    assert ctx.metrics == {}
    row = {(r.group, r.slot): i for i, r in enumerate(batch.rollout)}
    for g in ctx.started:
        for r, (_, kind, at) in zip(g.rollouts, g.extras[PLAN], strict=True):
            i = row[g.id, r.slot]
            assert bool(batch.is_artificial_branch[i]) == (kind == "artificial")
            if kind != "root":
                assert not batch.response_mask[i, :at].any() and batch.hint_mask[i, at] == (kind == "artificial")
                assert batch.response_mask[i, at + (kind == "artificial")]
    assert bool(rlx.prepare(trainer.parts, batch).batch.advantages.isfinite().all())


def test_plans_repeat_and_depend_on_the_step():
    plans = [[g.extras[PLAN] for g in run()[1].started] for _ in range(2)]
    assert plans[0] == plans[1]
    trainer, ctx, _ = run()
    trainer.train_step()
    later = trainer.context()
    trainer.rollouts(later)
    assert [g.extras[PLAN] for g in later.started] != plans[0]


def test_a_host_that_can_not_ban_a_token_is_refused():
    host = rlx.HostProfile("any", PROFILE.signals, PROFILE.capabilities - {"ban_tokens"}, {"ban_tokens": "not here"})
    with pytest.raises(rlx.ConfigError, match="allocator resum.*'ban_tokens'.*not here"):
        rlx.build({"method": {"name": "resum", "phrase": [7]}}, host)


def test_a_phrase_is_needed():
    with pytest.raises(rlx.ConfigError, match="'phrase' has no default"):
        rlx.create("method", "resum")
    with pytest.raises(rlx.ConfigError, match="resum.phrase"):
        rlx.create("allocator", "resum", phrase=())
