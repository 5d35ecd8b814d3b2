"""ARRoL: which running rollouts go on, and what the head and the counts learn from the survivors."""

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlx_plugins import Allocator, Context, Group, Parts, Pruner, Segment, create, drive, rollout_program
from rlx_plugins.hosts.table import TableHost, TableTrainer
from rlx_plugins.pruning.arrol import inclusion_probabilities, systematic_sample
from rlx_plugins.testing import evaluate

NAN = float("nan")
GRID = [(i + 0.5) / 100 for i in range(100)]


def arrol(score, finished=None, reward=None, uniform=(0.3,), group=None, **params):
    n = len(score)
    inputs = {
        "score": score,
        "group": [0] * n if group is None else group,
        "finished": [False] * n if finished is None else finished,
        "reward": [1.0] * n if reward is None else reward,
        "uniform": list(uniform),
    }
    return evaluate("pruner", "arrol", inputs, params)


COUNTS = {"n_pos": [0, 1, 0, 3, 4, 0, 0, 6, 0, 8], "n_neg": [5, 6, 0, 4, 4, 0, 0, 2, 0, 1]}


# ---- the choice


def test_kappa_one_keeps_every_rollout_with_probability_one():
    got = arrol([0.1, 0.9, 0.5], kappa=1.0, **COUNTS)
    assert got["keep"] == [True] * 3
    assert got["keep_prob"].tolist() == [1.0] * 3
    assert got["groups"] == [{"K": 3, "running_slots": 3, "rho_running": None}]


@given(
    rows=st.lists(st.tuples(st.floats(0, 1), st.booleans(), st.booleans()), min_size=1, max_size=12),
    u=st.floats(0, 0.999999),
    kappa=st.sampled_from([0.25, 0.5, 0.8]),
    rho=st.sampled_from([0.0, 0.3, 0.5, 1.0]),
)
@settings(max_examples=40, deadline=None)
def test_exactly_the_free_slots_are_filled(rows, u, kappa, rho):
    score, finished, right = (list(column) for column in zip(*rows, strict=True))
    got = arrol(score, finished, [float(y) for y in right], [u], kappa=kappa, rho=rho, **COUNTS)
    running = finished.count(False)
    survivors = sum(k and not f for k, f in zip(got["keep"], finished, strict=True))
    (group,) = got["groups"]
    assert group["K"] == min(len(rows), max(int(kappa * len(rows) + 0.5), 2))
    assert survivors == min(running, max(group["K"] - finished.count(True), 0))
    assert all(k for k, f in zip(got["keep"], finished, strict=True) if f)
    s = [p for p, f in zip(got["keep_prob"].tolist(), finished, strict=True) if not f]
    assert sum(s) == pytest.approx(survivors)
    assert all(0 <= p <= 1 for p in s)


def test_over_uniform_draws_a_rollout_is_kept_with_its_probability():
    score = [0.15, 0.35, 0.72, 0.91, 0.44]
    runs = [arrol(score, uniform=[u], **COUNTS) for u in GRID]
    kept = torch.tensor([run["keep"] for run in runs]).double().mean(0)
    assert torch.allclose(kept, runs[0]["keep_prob"], atol=2 / len(GRID))


def test_weighted_counts_grow_by_the_number_of_running_scored_rollouts_on_average():
    score = [0.15, 0.35, 0.72, NAN, 0.91, 0.44]
    reward = [0.0, 1.0, 1.0, 1.0, 0.0, 0.0]
    runs = [arrol(score, None, reward, [u], decay=1.0, **COUNTS) for u in GRID]
    total = sum(COUNTS["n_pos"]) + sum(COUNTS["n_neg"])
    grown = [float(run["n_pos"].sum() + run["n_neg"].sum()) - total for run in runs]
    assert sum(grown) / len(GRID) == pytest.approx(5, rel=0.05)


def test_a_target_equal_to_the_expected_share_prunes_at_random():
    # p_hat is 1/2 everywhere at the start, so the target share 1/2 asks for no preference.
    got = arrol([0.1, 0.4, 0.6, 0.9], rho=0.5)
    assert got["p_hat"].tolist() == [0.5] * 4
    assert got["keep_prob"].tolist() == pytest.approx([0.5] * 4)


@pytest.mark.parametrize(("rho", "sign"), [(1.0, 1), (0.0, -1)])
def test_the_target_share_decides_whether_likely_successes_are_favoured(rho, sign):
    got = arrol([0.15, 0.35, 0.72, 0.91, 0.44], rho=rho, **COUNTS)
    by_success = got["keep_prob"][got["p_hat"].argsort()] * sign
    assert bool((by_success.diff() > 0).all())


def test_probabilities_are_capped_at_one_and_the_rest_is_shared_again():
    assert inclusion_probabilities([6.0, 3.0, 2.0, 1.0], 2) == pytest.approx([1.0, 1 / 2, 1 / 3, 1 / 6])
    assert inclusion_probabilities([9.0, 6.0, 2.0, 1.0], 3) == pytest.approx([1.0, 1.0, 2 / 3, 1 / 3])
    assert inclusion_probabilities([0.0, 0.0, 1.0], 2) == [0.0, 0.0, 1.0]


def test_systematic_sampling_keeps_the_entries_in_whose_stretch_a_tick_falls():
    # Running sums in order 2, 0, 1: 0 .. 0.5 .. 1.25 .. 2; ticks at u and u + 1.
    s, order = [0.75, 0.75, 0.5], [2, 0, 1]
    assert systematic_sample(s, order, 0.2) == [True, False, True]
    assert systematic_sample(s, order, 0.5) == [True, True, False]
    assert systematic_sample(s, order, 0.0) == [True, False, True]


def test_finished_rollouts_that_fill_the_quota_leave_no_slot():
    got = arrol([0.9] * 4, [True, True, True, False], [1, 0, 1, 1])
    assert got["keep"] == [True, True, True, False]
    assert got["keep_prob"].tolist() == [1.0, 1.0, 1.0, 0.0]
    assert got["groups"] == [{"K": 2, "running_slots": 0, "rho_running": None}]


def test_early_successes_turn_the_running_slots_to_failures():
    got = arrol([0.1, 0.1, 0.1, 0.1, 0.1, 0.9], [True] * 2 + [False] * 4, [1, 1, 0, 0, 0, 1], rho=0.5, **COUNTS)
    assert got["groups"][0]["rho_running"] == 0.0
    assert got["keep_prob"][5] < got["keep_prob"][2]


@pytest.mark.parametrize("n", [1, 2])
def test_a_group_no_larger_than_the_minimum_is_kept_whole(n):
    assert arrol([0.5] * n)["keep"] == [True] * n
    assert arrol([0.5] * n, min_keep=3)["keep"] == [True] * n


def test_the_minimum_raises_the_share_kept_of_a_small_group():
    assert arrol([0.5] * 4, min_keep=3)["keep"].count(True) == 3


def test_a_score_of_nan_counts_as_the_mean_of_the_others_finished_ones_included():
    got = arrol([0.15, NAN, 0.72], [False] * 3, **COUNTS)
    assert got["p_hat"].tolist() == pytest.approx([2 / 9, (2 / 9 + 7 / 10) / 2, 7 / 10])
    got = arrol([0.15, NAN, 0.72, NAN], [False] * 3 + [True], [0, 0, 0, 1], **COUNTS)
    assert got["p_hat"].tolist() == pytest.approx([2 / 9, (2 / 9 + 7 / 10 + 1) / 3, 7 / 10, 1])


def test_without_any_score_the_finished_rollouts_alone_tell_and_the_choice_is_uniform():
    got = arrol([NAN, NAN, NAN, 0.5], [False, False, False, True], [0, 0, 0, 1], **COUNTS)
    assert got["p_hat"].tolist() == [1.0] * 4
    assert got["keep_prob"].tolist() == pytest.approx([1 / 3] * 3 + [1])


def test_scores_of_nan_alone_count_as_one_half_and_teach_nothing():
    got = arrol([NAN, NAN, NAN], **COUNTS)
    assert got["p_hat"].tolist() == [0.5, 0.5, 0.5]
    assert got["n_pos"].tolist() == pytest.approx([0.9 * n for n in COUNTS["n_pos"]])


def test_a_score_of_one_falls_into_the_last_bin():
    got = arrol([1.0, 0.0], **COUNTS)
    assert got["p_hat"].tolist() == pytest.approx([9 / 11, 1 / 7])


def test_a_score_on_a_bin_s_edge_belongs_to_the_upper_bin():
    got = arrol([0.7, 0.9], **COUNTS)
    assert got["p_hat"].tolist() == pytest.approx([7 / 10, 9 / 11])


def test_an_unscorable_survivor_teaches_nothing():
    got = arrol([0.5, 0.6], reward=[NAN, 1.0], decay=1.0)
    assert (float(got["n_pos"].sum()), float(got["n_neg"].sum())) == (1.0, 0.0)


def test_each_group_has_its_own_quota_and_its_own_draw():
    group, score = [1, 0, 1, 0, 1, 0, 0, 1], [0.2, 0.9, 0.4, 0.3, 0.8, 0.5, 0.1, 0.95]
    got = arrol(score, group=group, uniform=[0.1, 0.8], **COUNTS)
    for g, u in ((0, 0.1), (1, 0.8)):
        rows = [i for i, h in enumerate(group) if h == g]
        alone = arrol([score[i] for i in rows], uniform=[u], **COUNTS)
        assert [got["keep"][i] for i in rows] == alone["keep"]
        assert got["keep_prob"][rows].tolist() == alone["keep_prob"].tolist()


# ---- in the rollout program


@dataclass
class Waves(Allocator):
    """Two waves of four."""

    kind, name = "allocator", "waves"

    def more(self, idle, ctx):
        return [r for g in idle if len(g.rollouts) < 8 for r in g.start(4)]


def run(part, *others, step=50, host=None, **context):
    host = host or TableHost(4, lengths=lambda r: 8, score=lambda r: (float(r.slot % 2), {}))
    parts = Parts({kind: [p for p in (part, *others) if p.kind == kind] for kind in ("allocator", "pruner")})
    settings = {"groups": 3, "group_size": 8, "max_tokens": 16, "offered": list(host.prompts)} | context
    ctx = Context(step, 100, prompts=host.prompts, version=0, **settings)
    return drive(rollout_program(parts, ctx), host.execute), ctx


def test_survivors_carry_their_propensity_and_the_pruned_are_gone():
    part = create("pruner", "arrol", length=3)
    groups, ctx = run(part)
    for g in groups:
        assert len(g.done()) == 4
        assert [r.propensity for r in g.done()] == pytest.approx([0.5] * 4)
        assert [len(r) for r in g.rollouts if r.state == "pruned"] == [3] * 4
        assert all(0 < r.extras["arrol_score"] < 1 and set(r.extras) == {"arrol_score"} for r in g.rollouts)
    assert ctx.metrics["pruner/arrol_pruned"] == 12


def test_the_weighted_success_rate_of_the_survivors_is_unbiased():
    # Score bins that tell success from failure, 2 of 8 right: the survivors are balanced on purpose.
    score, reward = [0.95] * 2 + [0.05] * 6, [1.0] * 2 + [0.0] * 6
    counts = {"n_pos": [1] + [0] * 8 + [20], "n_neg": [20] + [0] * 8 + [1]}
    plain, weighted = [], []
    for u in GRID:
        got = arrol(score, None, reward, [u], **counts)
        kept = [(y, float(s)) for y, s, k in zip(reward, got["keep_prob"], got["keep"], strict=True) if k]
        plain.append(sum(y for y, _ in kept) / len(kept))
        weighted.append(sum(y / s for y, s in kept) / 8)
    assert sum(plain) / len(GRID) > 0.4
    assert sum(weighted) / len(GRID) == pytest.approx(0.25, abs=0.02)


def test_a_second_wave_has_a_quota_of_its_own():
    part = create("pruner", "arrol", length=3)
    groups, _ = run(part, Waves())
    for g in groups:
        assert [sum(r.wave == w for r in g.done()) for w in (0, 1)] == [2, 2]


def test_two_waves_of_a_group_use_different_draws():
    part = create("pruner", "arrol", length=3)
    groups, _ = run(part, Waves(), groups=4)
    first = [[r.slot for r in g.done() if r.wave == 0] for g in groups]
    second = [[r.slot - 4 for r in g.done() if r.wave == 1] for g in groups]
    assert first != second


def test_all_hidden_states_of_a_look_are_asked_for_at_once():
    asked = []
    host = TableHost(4, lengths=lambda r: 8)
    execute = host.execute

    def counting(operation):
        asked.append(type(operation).__name__)
        return execute(operation)

    host.execute = counting
    run(create("pruner", "arrol", length=3), host=host)
    assert asked.count("Forward") == 1


def test_the_warm_up_scores_and_learns_without_pruning():
    part = create("pruner", "arrol", length=3, warmup=10)
    groups, _ = run(part, step=9)
    assert [len(g.done()) for g in groups] == [8, 8, 8]
    assert sum(part.positive) == sum(part.negative) == 12
    assert part.head and part.optimizer


def test_rollouts_that_end_before_the_look_are_kept_and_not_scored():
    host = TableHost(4, lengths=lambda r: 2 if r.slot < 3 else 8, score=lambda r: (1.0, {}))
    groups, _ = run(create("pruner", "arrol", length=3), host=host)
    for g in groups:
        assert [r.slot for r in g.done()][:3] == [0, 1, 2]
        assert len(g.done()) == 4
        assert [r.propensity for r in g.done()[:3]] == [1.0] * 3
        assert not any("arrol_score" in r.extras for r in g.done()[:3])


def test_the_head_learns_to_tell_success_from_failure():
    part = create("pruner", "arrol", length=4, warmup=40, learning_rate=0.01, width=16, head_steps=5)
    trainer = TableTrainer({"pruner": part}, host=TableHost(12), total_steps=40, learning_rate=1e-6, groups=12)
    trainer.run(15)
    losses = [entry["pruner/arrol_head_loss"] for entry in trainer.log]
    assert sum(losses[-3:]) < 0.85 * sum(losses[:3])


def test_the_head_takes_hidden_states_of_the_host_s_dtype_and_keeps_plain_state(tmp_path):
    part = create("pruner", "arrol", length=3)
    run(part)
    torch.save(part.state_dict(), tmp_path / "state.pt")
    fresh = create("pruner", "arrol", length=3)
    fresh.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    again, _ = run(part)
    resumed, _ = run(fresh)
    assert [[r.slot for r in g.done()] for g in again] == [[r.slot for r in g.done()] for g in resumed]
    assert torch.equal(part.head["w1"], fresh.head["w1"])


def test_pauses_of_other_pruners_are_not_looked_at():
    @dataclass
    class Earlier(Pruner):
        kind, name = "pruner", "earlier"

        def pause(self, ctx):
            return [2, 5]

    groups, ctx = run(create("pruner", "arrol", length=3), Earlier())
    assert {len(r) for g in groups for r in g.rollouts if r.state == "pruned"} == {3}
    assert ctx.metrics["pruner/arrol_pruned"] == 12


def test_the_head_s_optimizer_goes_on_from_step_to_step():
    part = create("pruner", "arrol", length=3)
    for _ in range(3):
        run(part)
    assert {int(entry["step"]) for entry in part.optimizer["state"].values()} == {3}


def test_rollouts_that_start_beyond_the_length_are_not_looked_at():
    brought = Group("old", "p0", [100])
    for r in brought.start(4):
        r.segments, r.max_tokens = [Segment([1] * 5, "hint")], 16

    @dataclass
    class Bringing(Pruner):
        kind, name = "pruner", "bringing"

        def intake(self, need, ctx):
            return [brought], 0

    groups, _ = run(create("pruner", "arrol", length=3), Bringing(), groups=1)
    assert len(groups[0].done()) == 4
