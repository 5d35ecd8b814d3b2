"""V_0.5's allocator: when the prior is trusted, when more rollouts are drawn, and how many at most."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import rlx_plugins as rlx
from rlx_plugins.allocation.v05 import baseline_error
from rlx_plugins.hosts.table import PROFILE, TableHost, TableTrainer
from rlx_plugins.testing import evaluate

STREAM = st.lists(st.sampled_from([-1, 1]), min_size=16, max_size=16)
PRIOR = st.floats(-1, 1).map(lambda x: round(x, 3))


def v05(streams, prior, **params):
    return evaluate("allocator", "v05", {"streams": streams, "prior": prior}, params)


@settings(max_examples=80, deadline=None)
@given(st.lists(st.tuples(STREAM, PRIOR), min_size=1, max_size=4))
def test_the_number_of_rollouts_the_weight_and_the_baseline_stay_in_their_bounds(cases):
    streams, prior = [s for s, _ in cases], [v for _, v in cases]
    out = v05(streams, prior)
    for s, v, k, w, b in zip(streams, prior, out["k"], out["weight"], out["baseline"], strict=True):
        m = sum(s[:k]) / k
        assert 4 <= k <= 16 and 0 <= w < 1
        assert min(m, v) - 1e-12 <= b <= max(m, v) + 1e-12 and abs(b - m) <= 1 / math.sqrt(k) + 1e-12
    assert out["total"] == sum(out["k"])


@settings(max_examples=40, deadline=None)
@given(STREAM, PRIOR)
def test_flipping_rewards_and_prior_flips_the_result_and_not_the_number(stream, prior):
    out, flipped = v05([stream], [prior]), v05([[-x for x in stream]], [-prior])
    assert flipped["k"] == out["k"]
    assert flipped["baseline"][0] == pytest.approx(-out["baseline"][0], abs=1e-12)
    assert flipped["advantages"][0] == pytest.approx([-a for a in out["advantages"][0]], abs=1e-12)


def test_rewards_of_0_and_1_are_the_same_rule_on_another_scale():
    stream, prior = [1, 0, 0, 0, 1, 0, 0, 1] * 2, 0.9
    binary = v05([stream], [prior], binary01=True)
    scaled = v05([[2 * x - 1 for x in stream]], [2 * prior - 1])
    assert binary == scaled
    part = rlx.create("allocator", "v05", prior="p", reward_min=0.0)
    group = rlx.Group("g", "q", [], extras={"p": prior})
    for r, reward in zip(group.start(4), stream):
        r.finish("eos")
        r.reward = float(reward)
    assert part.stop(group) is None and scaled["k"][0] > 4


def test_agreement_stops_at_once_however_cheap_a_rollout_is():
    out = v05([[1, 1, 1, -1] * 4], [0.6], cost=0)
    assert (out["k"], out["stop"]) == ([4], ["prior_ok"])


def test_the_gain_falls_below_the_cost_before_the_cap():
    out = v05([[-1] * 16], [1.0])
    assert out["stop"] == ["cap"] and out["k"] == [16]
    out = v05([[-1] * 16], [1.0], cost=0.01)
    assert out["stop"] == ["no_gain"] and out["k"] == [10]
    assert (
        baseline_error(3.9, 10) - baseline_error(3.9, 11) <= 0.01 < baseline_error(3.89, 9) - baseline_error(3.89, 10)
    )


@pytest.mark.parametrize("prior", [None, math.nan])
def test_without_a_prior_the_first_wave_is_all_and_the_mean_is_the_baseline(prior):
    out = v05([[1, -1, 1, 1] * 4], [prior])
    assert (out["k"], out["stop"], out["weight"]) == ([4], ["no_prior"], [1.0])
    assert out["baseline"] == [0.5]


def test_lost_rollouts_are_not_counted_but_cost_budget():
    out = v05([[None, 1, None, 1] + [None] * 12], [-1.0], k_max=8)
    assert (out["k"], out["stop"]) == ([2], ["cap"])


def test_in_a_run_groups_are_of_their_own_sizes_and_equal_groups_still_learn():
    config = {"method": {"name": "v05", "prior": "prior", "reward_min": 0.0, "max_per_prompt": 9, "wave": 2}}
    trainer = TableTrainer(config, host=TableHost(24), groups=12, max_tokens=8)
    ctx = trainer.context()
    batch = trainer.rollouts(ctx)
    sizes = [len(g.rollouts) for g in ctx.started]
    assert set(sizes) > {4} and max(sizes) <= 9
    assert ctx.metrics["allocator/v05_rollouts"] == sum(sizes) == batch.size
    ready = rlx.prepare(trainer.parts, batch).batch
    flat = ready.groups.spread(ready.groups.max(ready.rewards) == ready.groups.min(ready.rewards))
    assert flat.any() and bool((ready.advantages[flat].abs().max(1).values > 0).all())


def test_what_does_not_go_together_is_refused():
    with pytest.raises(rlx.ConfigError, match="v05.reward_min"):
        rlx.create("allocator", "v05", reward_min=1)
    with pytest.raises(rlx.ConfigError, match="v05.first_wave: must be <= max_per_prompt"):
        rlx.create("allocator", "v05", first_wave=8, max_per_prompt=4)
    with pytest.raises(rlx.ConfigError, match="v05.*value_prior"):
        rlx.build({"method": "v05"}, PROFILE)
    part = rlx.create("allocator", "v05")
    with pytest.raises(rlx.DataError, match="'value_prior' of prompt 'p' must be a number"):
        part.prior_of(rlx.Group("g", "p", [], extras={"value_prior": "high"}))
