"""ADHint: how long hints are, whom they help, and what becomes of hinted rows."""

import math
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import rlx_plugins as rlx
from rlx_plugins.hints.adhint import HINTED
from rlx_plugins.hosts.table import BAD, EOS, PROFILE, TableHost, TableTrainer
from rlx_plugins.testing import evaluate
from rlx_plugins.testing.scripted import ScriptedExecutor, table

SOLUTION = list(range(20, 30))
REWARDS = st.lists(st.sampled_from([0.0, 0.25, 1.0, 3.0, -1.0, math.nan]), max_size=6)


def adhint(naive_rewards, solution_len, noise=None, **params):
    inputs = {"naive_rewards": naive_rewards, "solution_len": solution_len}
    return evaluate("hint", "adhint", inputs | {"noise": noise or [0.0] * len(solution_len)}, params)


def run(part, reward, group_size=4, solution=SOLUTION, keys=("p0",), max_tokens=32, step=0, seed=0, **other):
    ctx = rlx.Context(
        step, 9, len(keys), group_size, max_tokens, {"p0": [1], "p1": [2]}, keys, lambda key: {"solution": solution}
    )
    ctx.seed = seed
    executor = ScriptedExecutor(reward, length=3)
    return rlx.drive(rlx.rollout_program(rlx.Parts({"hint": [part], **other}), ctx), executor), executor, ctx


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(REWARDS, st.integers(0, 60), st.floats(-0.3, 0.3)), min_size=1, max_size=4),
    st.sampled_from([(0.0, 0.0), (0.1, 0.9), (0.5, 0.6)]),
    st.sampled_from([0.0, 0.3]),
)
def test_hints_are_as_long_as_the_equations_say(prompts, bounds, skip):
    rewards, lengths, noise = (list(column) for column in zip(*prompts, strict=True))
    low, high = bounds
    out = adhint(rewards, lengths, noise, w_min=low, w_max=high, skip_difficulty=skip)
    for i, (given_rewards, length, drawn) in enumerate(prompts):
        scored = [min(max(r, 0.0), 1.0) for r in given_rewards if math.isfinite(r)]
        d = 1 - sum(scored) / len(scored) if scored else 1.0
        used = d > skip and length >= 2
        w = min(max((high - low) * d + low + drawn, low), high)
        want = min(max(math.floor(w * length + 0.5), 1), length - 1) if used else 0
        assert out["difficulty"][i] == pytest.approx(d)
        assert (out["use_hint"][i], out["hint_len"][i]) == (used, want)
        assert out["ratio"][i] == pytest.approx(w if used else 0)


def test_without_noise_better_rewards_never_lengthen_the_hint():
    rewards = [[1.0] * k + [0.0] * (8 - k) for k in range(9)]
    shares = adhint(rewards, [40] * 9)["ratio"]
    assert shares == sorted(shares, reverse=True) and shares[0] == 0.9 and shares[7] > 0.1 and shares[8] == 0


def test_the_scale_of_rewards_does_not_matter():
    rewards = [[0.0, 0.5, 1.0], [2.0, -1.0, 0.25], [None, 1.0]]
    tenfold = [[None if r is None else 10 * r for r in row] for row in rewards]
    assert adhint(rewards, [30] * 3) == adhint(tenfold, [30] * 3, r_max=10.0)


@pytest.mark.parametrize(("length", "hint"), [(0, 0), (1, 0), (2, 1), (3, 2), (10, 9)])
def test_a_solution_is_never_shown_whole_and_one_of_a_single_token_not_at_all(length, hint):
    assert adhint([[0.0]], [length], w_max=0.99)["hint_len"] == [hint]


@pytest.mark.parametrize("rewards", [[], [None, None], [math.inf]])
def test_prompts_without_a_finite_reward_count_as_the_hardest(rewards):
    assert adhint([rewards], [10])["difficulty"] == [1.0]


def test_hinted_rollouts_follow_the_plain_ones_within_one_group():
    (group,), executor, _ = run(rlx.create("hint", "adhint", noise_width=0), lambda r: float(r.helped or r.slot == 0))
    assert [[r.slot for r in wave] for wave in executor.launched] == [[0, 1], [2, 3]]
    batch = rlx.pack([group])
    assert batch.source == ["fresh"] * 2 + [HINTED] * 2 and batch.helped.tolist() == [False, False, True, True]
    assert batch.groups.sizes.tolist() == [4] and batch.rewards.tolist() == [1, 0, 1, 1]
    assert batch.response_ids[2].tolist() == [*SOLUTION[:5], 1, 1, 1]  # d = 1/2: half of the solution
    assert batch.hint_mask[2].tolist() == [True] * 5 + [False] * 3
    assert batch.response_mask[2].all() and not batch.hint_mask[:2].any()
    assert batch.logp_rollout[2, :5].isnan().all() and not batch.logp_rollout[2, 5:].isnan().any()


def test_prompts_that_are_solved_have_their_plain_rollouts_alone():
    part = rlx.create("hint", "adhint")
    groups, executor, ctx = run(part, table({"p0": [1.0] * 4, "p1": [1.0, 0.0]}), keys=("p0", "p1"))
    assert [len(g.rollouts) for g in groups] == [2, 4] and len(executor.launched) == 2
    assert (ctx.metrics["hint/adhint_difficulty"], ctx.metrics["hint/adhint_hinted"]) == (0.25, 0.5)
    groups, _, _ = run(rlx.create("hint", "adhint", skip_difficulty=0.5), table({"p0": [1.0, 0.0]}))
    assert len(groups[0].rollouts) == 2


def test_prompts_are_helped_once_and_difficulty_is_that_of_the_plain_rollouts():
    part = rlx.create("hint", "adhint")
    (group,), executor, _ = run(part, lambda r: float(r.helped))
    assert len(executor.launched) == 2 and len(group.rollouts) == 4
    assert part.difficulty(group) == 1.0


@pytest.mark.parametrize(("given", "plain"), [(None, 4), (1, 7), (6, 2)])
def test_the_group_size_is_divided_between_the_two_sets(given, plain):
    (group,), _, _ = run(rlx.create("hint", "adhint", hinted_rollouts=given), lambda r: 0.0, group_size=8)
    assert [r.tag for r in group.rollouts] == [""] * plain + [HINTED] * (8 - plain)


@pytest.mark.parametrize(("group_size", "hinted_rollouts"), [(1, None), (4, 4)])
def test_a_division_that_leaves_no_plain_rollout_is_refused(group_size, hinted_rollouts):
    part = rlx.create("hint", "adhint", hinted_rollouts=hinted_rollouts)
    with pytest.raises(rlx.ConfigError, match="hint adhint starts .* leaves none"):
        run(part, lambda r: 0.0, group_size=group_size)


@dataclass
class Five(rlx.Allocator):
    """Five rollouts for every prompt but p1, which gets none."""

    kind, name = "allocator", "five"

    def more(self, idle, ctx):
        return [r for g in idle if not g.rollouts and g.prompt_key != "p1" for r in g.start(5)]


def test_beside_an_allocator_hinted_rollouts_come_on_top_where_it_gave_any():
    part = rlx.create("hint", "adhint", hinted_rollouts=3)
    (group,), _, ctx = run(part, lambda r: 0.0, keys=("p0", "p1"), allocator=[Five()])
    assert [r.tag for r in group.rollouts] == [""] * 5 + [HINTED] * 3
    assert [len(g.rollouts) for g in ctx.started] == [8, 0]


def test_a_long_solution_is_measured_up_to_what_the_response_has_room_for():
    def tokens(**params):
        (group,), _, _ = run(rlx.create("hint", "adhint", noise_width=0, **params), lambda r: 0.0, max_tokens=8)
        return [len(s.tokens) for s in group.rollouts[-1].segments]

    assert tokens() == [6, 2]  # 0.9 of seven tokens
    assert tokens(min_continuation=4) == [3, 3]  # of four, less the last
    assert tokens(min_continuation=7) == [3]  # one token is left: no hint


def test_noise_is_the_groups_own_within_its_width_and_repeats():
    part = rlx.create("hint", "adhint", noise_width=0.2)
    ctx = rlx.Context(3, 9, 1, 4, 8, {})
    drawn = [part.noise(rlx.Group(f"g{i}", "p", []), ctx) for i in range(400)]
    assert -0.2 <= min(drawn) < -0.19 and 0.19 < max(drawn) <= 0.2 and abs(sum(drawn) / 400) < 0.02
    assert drawn == [part.noise(rlx.Group(f"g{i}", "p", []), ctx) for i in range(400)]

    def lengths(seed):
        groups, _, _ = run(part, lambda r: 0.0, solution=list(range(300)), keys=("p0", "p0"), max_tokens=400, seed=seed)
        return [len(r.segments[0].tokens) for g in groups for r in g.rollouts if r.helped]

    assert lengths(0) == lengths(0) != lengths(1)
    assert len(set(lengths(0)[:2])) == 1 < len(set(lengths(0)))  # a group's hinted rollouts share their hint


def test_survivors_of_a_pruner_count_by_their_propensity():
    rows = [rlx.Rollout("p", "g", i, [], state="finished", reward=float(i == 0)) for i in range(2)]
    rows[0].propensity = 0.25
    assert rlx.create("hint", "adhint").difficulty(rlx.Group("g", "p", [], rollouts=rows)) == pytest.approx(0.2)


def test_a_missing_column_and_one_left_as_text_are_refused():
    part = rlx.create("hint", "adhint", column="proof")
    assert part.token_columns == {"proof"}
    with pytest.raises(rlx.ConfigError, match=r"'proof'.*hint.column=NAME"):
        run(part, lambda r: 0.0)
    with pytest.raises(rlx.ConfigError, match="is text"):
        run(rlx.create("hint", "adhint"), lambda r: 0.0, solution="x = 2")


def test_bounds_in_the_wrong_order_are_refused():
    with pytest.raises(rlx.ConfigError, match="adhint.min_share: must be at most max_share=0.5"):
        rlx.create("hint", "adhint", min_share=0.6, max_share=0.5)


def test_the_whole_method_trains_hints_where_they_led_to_success():
    seen = []

    class Watched(TableTrainer):
        def update(self, prepared):
            seen.append(prepared.batch)
            return super().update(prepared)

    trainer = Watched({"method": "adhint"}, host=TableHost(8), groups=8, group_size=8, max_tokens=12)
    trainer.run(3)
    assert all(math.isfinite(entry["loss"]) for entry in trainer.log)
    assert trainer.parts.state_dict() == {key: {} for key in trainer.parts.state_dict()}
    assert 0 < trainer.log[0]["hint/adhint_difficulty"] and trainer.log[0]["hint/adhint_hinted"] > 0
    hint_weights = torch.cat([b.loss_weight[b.hint_mask] for b in seen])
    assert (hint_weights > 0).any() and (hint_weights == 0).any()
    for batch in seen:
        assert torch.equal(batch.hint_mask.any(1), batch.helped)
        assert batch.response_mask[batch.hint_mask].all()
        assert set(batch.groups.sizes.tolist()) <= {4, 8}
        assert (batch.loss_weight[batch.hint_mask & (batch.advantages < 0)] == 0).all()
        assert {BAD, EOS}.isdisjoint(batch.response_ids[batch.hint_mask].tolist())


def test_hint_tokens_get_the_gradient_of_their_row_unless_it_is_pushed_down():
    config = {"method": {"name": "adhint", "noise_width": 0.0}}
    parts = rlx.build(config, PROFILE)
    (group,), _, _ = run(parts.one("hint"), lambda r: float(r.slot % 2 == 0))
    packed = rlx.pack([group], dtype=torch.float64)
    logp = torch.full(packed.response_mask.shape, -1.0, dtype=torch.float64, requires_grad=True)
    batch = packed.with_columns(logp_old=logp.detach(), entropy=torch.ones_like(logp).where(~packed.hint_mask, 1.5))
    prepared = rlx.prepare(parts, batch)
    tokens = 3 + 3 + 8 + 8
    loss, _ = rlx.policy_loss(parts, prepared.batch, logp, totals={"policy": torch.tensor(float(tokens))})
    loss.backward()
    own = -0.5 / (math.sqrt(0.5) + 1e-6) / tokens  # half of each set succeeds, so the gap is 0
    alike = math.exp(-0.5)
    assert logp.grad[2].tolist() == pytest.approx([alike * own] * 5 + [own] * 3)
    assert logp.grad[3].tolist() == pytest.approx([0.0] * 5 + [-own] * 3)
    assert logp.grad[:2].tolist() == [pytest.approx([g] * 3 + [0.0] * 5) for g in (own, -own)]
