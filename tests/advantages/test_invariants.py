"""What every estimator keeps to, and the properties the papers state, on ragged groups in any order."""

import math
import random

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from rlx_plugins import ConfigError, HostProfile, RolloutBatch, build, create

EVERY = [
    ("grpo", {}),
    ("grpo", {"scale": "batch"}),
    ("dr_grpo", {}),
    ("rloo", {}),
    ("rloo", {"kl_coef": 0.3, "normalize": True}),
    ("reinforce_pp", {}),
    ("reinforce_pp", {"discount": 0.9}),
    ("reinforce_pp", {"baseline": "group"}),
    ("gdpo", {}),
    ("gdpo", {"whiten": "sample"}),
    ("dvao", {}),
    ("gapo_snr", {}),
    ("gapo_snr", {"center": "mean", "share": 0.7}),
    ("avspo", {"initial_threshold": 0.01}),
    ("lead", {}),
]
OF_THE_GROUP = [(n, p) for n, p in EVERY if p.get("scale", n) in ("grpo", "dr_grpo", "dvao", "gapo_snr")] + [
    ("rloo", {})
]
every = pytest.mark.parametrize(("name", "params"), EVERY, ids=[f"{n} {p or ''}" for n, p in EVERY])
of_the_group = pytest.mark.parametrize(
    ("name", "params"), OF_THE_GROUP, ids=[f"{n} {p or ''}" for n, p in OF_THE_GROUP]
)

EIGHTHS = st.integers(-8, 8).map(lambda k: k / 8)  # exact in bfloat16
ROW = st.tuples(st.integers(0, 3), st.one_of(EIGHTHS, st.none()), st.booleans(), EIGHTHS, st.integers(0, 5))
ROWS = st.lists(ROW, min_size=2, max_size=24).filter(lambda rows: any(r[1] is not None for r in rows))


def batch_of(rows, dtype=torch.float64, width=5):
    """Rows (group, reward or None, correct, efficiency, length); log-probs are a fixed function of the position."""
    group, reward, correct, efficiency, length = zip(*rows, strict=True)
    rewards = torch.tensor([math.nan if r is None else r for r in reward], dtype=dtype)
    mask = torch.arange(width) < torch.tensor(length)[:, None]
    position = torch.arange(width, dtype=dtype).expand(len(rows), width)
    return RolloutBatch(
        {
            "rewards": rewards,
            "group": torch.tensor(group),
            "response_mask": mask,
            "reward_components": torch.stack(
                [torch.tensor(correct).to(dtype), torch.tensor(efficiency, dtype=dtype)], 1
            ),
            "logp_old": -position / 8,
            "logp_ref": -(position**2) / 32,
        }
    )


def advantages(name, params, batch):
    """[B,T], from a plug-in without history."""
    return create("advantage", name, **params)(batch)["advantages"]


def same(got, want, atol=1e-9):
    torch.testing.assert_close(got, want, rtol=0, atol=atol)


# ---- every estimator -----------------------------------------------------------------------------------------------


@every
@settings(max_examples=10, deadline=None)
@given(rows=ROWS)
def test_masked_tokens_and_unscorable_rows_have_advantage_zero_and_nothing_is_nan(name, params, rows):
    batch = batch_of(rows)
    got = advantages(name, params, batch)
    assert got.shape == batch.response_mask.shape and torch.isfinite(got).all()
    assert (got[~batch.response_mask] == 0).all()
    assert (got[batch.rewards.isnan()] == 0).all()


@every
@settings(max_examples=10, deadline=None)
@given(rows=ROWS, shuffle=st.randoms(use_true_random=False))
def test_permuting_the_rows_permutes_the_advantages(name, params, rows, shuffle):
    order = torch.tensor(shuffle.sample(range(len(rows)), len(rows)))
    batch = batch_of(rows)
    same(advantages(name, params, batch.rows(order)), advantages(name, params, batch)[order])


@every
@settings(max_examples=10, deadline=None)
@given(rows=ROWS)
def test_an_unscorable_row_counts_nowhere(name, params, rows):
    batch = batch_of(rows)
    scored = ~batch.rewards.isnan()
    same(advantages(name, params, batch)[scored], advantages(name, params, batch.rows(scored)))


@every
@settings(max_examples=10, deadline=None)
@given(rows=ROWS)
def test_padding_and_garbage_under_the_mask_change_nothing(name, params, rows):
    batch = batch_of(rows)
    garbage = {
        column: torch.where(batch.response_mask, batch[column], torch.nan) for column in ("logp_old", "logp_ref")
    }
    nothing = torch.full((len(rows), 3), torch.nan, dtype=torch.float64)
    padded = batch.with_columns(
        response_mask=torch.cat([batch.response_mask, torch.zeros(len(rows), 3, dtype=torch.bool)], 1),
        **{column: torch.cat([values, nothing], 1) for column, values in garbage.items()},
    )
    got = advantages(name, params, padded)
    same(got[:, :5], advantages(name, params, batch))
    assert (got[:, 5:] == 0).all()


@every
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rewards_of_any_precision_are_computed_in_float32_or_better(name, params, dtype):
    draw = random.Random(3)
    rows = [
        (k // 6, draw.randint(-8, 8) / 8, draw.random() < 0.6, draw.randint(-8, 8) / 8, draw.randint(0, 5))
        for k in range(48)
    ]
    low = batch_of(rows, dtype)
    low = low.with_columns(**{c: low[c].to(torch.float32) for c in ("logp_old", "logp_ref")})
    got = advantages(name, params, low)
    assert got.dtype == torch.float32
    same(got.double(), advantages(name, params, batch_of(rows)), atol=2e-5)


@of_the_group
@settings(max_examples=10, deadline=None)
@given(rows=ROWS)
def test_the_advantages_of_a_group_depend_on_its_own_rows_only(name, params, rows):
    batch = batch_of(rows)
    together = advantages(name, params, batch)
    for g in batch.group.unique():
        alone = batch.group == g
        same(together[alone], advantages(name, params, batch.rows(alone)))


@of_the_group
@settings(max_examples=10, deadline=None)
@given(reward=st.floats(-100, 100, width=32), n=st.integers(1, 30))
def test_a_group_whose_rewards_are_all_equal_has_advantages_of_exactly_zero(name, params, reward, n):
    rewards = torch.full((n,), reward)
    batch = RolloutBatch(
        {
            "rewards": rewards,
            "group": torch.full((n,), 5),
            "response_mask": torch.ones(n, 2, dtype=torch.bool),
            "reward_components": torch.stack([rewards, -rewards], 1),
        }
    )
    assert (advantages(name, params, batch) == 0).all()


# ---- one reward per row ----------------------------------------------------------------------------------------------


def of_rewards(name, rewards, group=None, lengths=None, **params):
    """[B] advantages of the rows' first tokens."""
    rewards = torch.as_tensor(rewards, dtype=torch.float64)
    lengths = torch.ones(len(rewards), dtype=torch.int64) if lengths is None else torch.tensor(lengths)
    group = torch.zeros(len(rewards), dtype=torch.int64) if group is None else torch.as_tensor(group)
    mask = torch.arange(int(lengths.max())) < lengths[:, None]
    batch = RolloutBatch({"rewards": rewards, "group": group, "response_mask": mask})
    return create("advantage", name, **params)(batch)["advantages"][:, 0]


REWARDS = st.lists(st.floats(-2, 2).map(lambda x: round(x, 3)), min_size=2, max_size=12).map(torch.tensor)
VARIED = REWARDS.filter(lambda r: float(r.max() - r.min()) > 0.05).map(lambda r: r.double())


@settings(max_examples=50, deadline=None)
@given(VARIED)
def test_grpo_has_mean_zero_and_the_std_its_eps_leaves(rewards):
    a, sd = of_rewards("grpo", rewards, eps=0.1), rewards.std()
    assert float(a.mean()) == pytest.approx(0, abs=1e-9)
    assert float(a.std()) == pytest.approx(float(sd / (sd + 0.1)))
    assert float(a.abs().max()) <= (len(a) - 1) / math.sqrt(len(a))


@settings(max_examples=50, deadline=None)
@given(VARIED, st.floats(0.1, 10), st.floats(-5, 5))
@pytest.mark.parametrize("name", ["grpo", "gapo_snr"])
def test_a_positive_affine_change_of_the_rewards_changes_no_z_score(name, rewards, slope, shift):
    rewards = (rewards * 1000).round() / 1024  # exact sums: no tie is broken by rounding
    slope, shift = 2.0 ** round(math.log2(slope)), round(shift)
    same(of_rewards(name, slope * rewards + shift, eps=1e-12), of_rewards(name, rewards, eps=1e-12), atol=1e-7)


@pytest.mark.parametrize(("n", "solved"), [(4, 1), (8, 5)])
def test_grpo_on_binary_rewards_has_the_closed_form(n, solved):
    p = solved / n
    a = of_rewards("grpo", [1.0] * solved + [0.0] * (n - solved), eps=1e-12)
    success = math.sqrt((n - 1) / n * (1 - p) / p)
    failure = -math.sqrt((n - 1) / n * p / (1 - p))
    assert a.tolist() == pytest.approx([success] * solved + [failure] * (n - solved))


def test_grpo_scaled_by_the_batch_divides_by_the_spread_of_all_scorable_rewards():
    rewards, group = [1.0, 0.0, 4.0, 2.0, math.nan], [0, 0, 1, 1, 1]
    sd = torch.tensor([1.0, 0.0, 4.0, 2.0], dtype=torch.float64).std()
    want = torch.tensor([0.5, -0.5, 1.0, -1.0, 0.0], dtype=torch.float64) / (sd + 1e-6)
    same(of_rewards("grpo", rewards, group, scale="batch"), want)


@settings(max_examples=50, deadline=None)
@given(VARIED)
def test_dr_grpo_is_grpo_without_scaling_and_rloo_is_n_over_n_minus_one_of_it(rewards):
    centred, n = of_rewards("dr_grpo", rewards), len(rewards)
    same(centred, of_rewards("grpo", rewards, scale="none"))
    same(centred, rewards - rewards.mean())
    same(of_rewards("rloo", rewards), n / (n - 1) * centred)


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo", "gapo_snr"])
def test_a_group_of_one_has_advantage_zero_unless_its_raw_reward_is_asked_for(name):
    raw = 3.0 / (1 + 1e-6) if name in ("grpo", "gapo_snr") else 3.0
    assert of_rewards(name, [3.0, 1.0], [0, 1]).tolist() == [0, 0]
    assert of_rewards(name, [3.0, math.nan], [0, 0], singleton="raw").tolist() == pytest.approx([raw, 0])


@settings(max_examples=50, deadline=None)
@given(VARIED, st.integers(0, 11), st.floats(0.5, 2))
def test_rloo_moves_one_for_one_with_a_reward_and_against_the_others_by_their_share(rewards, i, more):
    i, n = i % len(rewards), len(rewards)
    moved = rewards.clone()
    moved[i] += more
    want = torch.full((n,), -more / (n - 1), dtype=torch.float64)
    want[i] = more
    same(of_rewards("rloo", moved) - of_rewards("rloo", rewards), want)


@settings(max_examples=50, deadline=None)
@given(VARIED)
def test_normalised_rloo_has_mean_zero_and_the_std_its_eps_leaves(rewards):
    a, s = of_rewards("rloo", rewards, normalize=True, eps=0.1), of_rewards("rloo", rewards).std()
    assert float(a.mean()) == pytest.approx(0, abs=1e-9)
    assert float(a.std()) == pytest.approx(float(s / (s + 0.1)))
    assert of_rewards("rloo", [2.0, 2.0, 2.0], normalize=True).tolist() == [0, 0, 0]


def test_an_infinite_reward_is_unscorable_even_where_rewards_are_clipped():
    assert of_rewards("rloo", [math.inf, 1.0, 0.0], reward_clip=(0.0, 1.0)).tolist() == [0, 1, -1]


def test_the_kl_in_rloos_reward_needs_the_reference_log_probs_and_only_then():
    host = HostProfile("table", signals=frozenset({"logp_old"}))
    build({"advantage": "rloo"}, host)
    with pytest.raises(ConfigError, match="advantage rloo needs the signal 'logp_ref'"):
        build({"advantage": {"name": "rloo", "kl_coef": 0.05}}, host)


# ---- reinforce_pp ----------------------------------------------------------------------------------------------------


def reinforce(token_rewards, mask, **params):
    token_rewards, mask = torch.as_tensor(token_rewards, dtype=torch.float64), torch.as_tensor(mask).bool()
    batch = RolloutBatch(
        {
            "rewards": torch.zeros(len(mask), dtype=torch.float64),
            "group": torch.arange(len(mask)) // 2,
            "response_mask": mask,
            "token_rewards": token_rewards,
        }
    )
    columns = create("advantage", "reinforce_pp", **params)(batch)
    return columns["advantages"], columns["returns"]


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 4), st.integers(1, 9), st.sampled_from([0.0, 0.5, 0.99, 1.0]), st.integers(0, 999))
def test_returns_follow_the_recurrence_over_model_tokens(rows, width, discount, seed):
    generator = torch.Generator().manual_seed(seed)
    mask = torch.rand(rows, width, generator=generator) < 0.6
    rewards = torch.randn(rows, width, generator=generator, dtype=torch.float64)
    _, returns = reinforce(torch.where(mask, rewards, torch.nan), mask, discount=discount)
    for b in range(rows):
        following = 0.0
        for t in reversed(range(width)):
            if mask[b, t]:
                following = float(rewards[b, t]) + discount * following
            assert float(returns[b, t]) == pytest.approx(following if mask[b, t] else 0.0, abs=1e-9)


@settings(max_examples=50, deadline=None)
@given(ROWS, st.sampled_from([{}, {"discount": 0.5}, {"baseline": "group"}]))
def test_whitened_tokens_have_mean_zero_and_unit_variance(rows, params):
    batch = batch_of(rows)
    columns = create("advantage", "reinforce_pp", **params)(batch)
    live = batch.response_mask & ~batch.rewards.isnan()[:, None]
    assume(live.sum() > 1 and columns["returns"][live].std() > 0.05)
    a = columns["advantages"][live]
    assert float(a.sum()) == pytest.approx(0, abs=1e-5)
    assert float(a.square().sum()) == pytest.approx(len(a) - 1, rel=1e-4)


def test_a_constant_added_to_all_rewards_cancels_in_reinforce_pp():
    rewards, lengths = torch.tensor([1.0, 0.0, 0.5]), [2, 3, 1]
    want = of_rewards("reinforce_pp", rewards, lengths=lengths)
    same(of_rewards("reinforce_pp", rewards + 7, lengths=lengths), want, atol=1e-6)  # verl's mean divides by N + 1e-8


@pytest.mark.parametrize("discount", [1.0, 0.5])
def test_a_row_reward_stands_on_the_last_model_token(discount):
    mask = [[1, 0, 1, 1], [1, 1, 0, 0]]
    want, returns = reinforce([[0, 0, 0, 2.0], [0, 1.0, 0, 0]], mask, discount=discount)
    batch = RolloutBatch(
        {
            "rewards": torch.tensor([2.0, 1.0], dtype=torch.float64),
            "group": torch.tensor([0, 0]),
            "response_mask": torch.tensor(mask).bool(),
        }
    )
    columns = create("advantage", "reinforce_pp", discount=discount)(batch)
    same(columns["advantages"], want)
    same(columns["returns"], returns)


def test_a_reward_on_a_masked_token_is_lost_in_the_plain_variant_and_counts_in_the_baseline_variant():
    mask, rewards = [[1, 0, 1], [1, 1, 1]], [[0, 5.0, 1.0], [0, 0, 0]]
    assert reinforce(rewards, mask)[1][0].tolist() == [1, 0, 1]
    assert reinforce(rewards, mask, baseline="group")[1].tolist() == [[3, 0, 3], [-3, -3, -3]]


def test_a_nan_reward_on_a_model_token_makes_the_row_unscorable():
    mask = torch.ones(3, 2)
    got, _ = reinforce([[0, math.nan], [0, 1.0], [0, 0.0]], mask)
    same(got[1:], reinforce([[0, 1.0], [0, 0.0]], mask[:2])[0])
    assert got[0].tolist() == [0, 0]


@pytest.mark.parametrize("params", [{}, {"discount": 0.5}, {"baseline": "group"}])
def test_fewer_than_two_tokens_cannot_be_whitened(params):
    assert (reinforce([[1.0, 0], [1.0, 0]], [[1, 0], [0, 0]], **params)[0] == 0).all()


def test_a_lone_row_keeps_its_raw_reward_before_whitening_on_request():
    rewards, mask = [[1.0], [0.0], [4.0]], [[1], [1], [1]]
    assert reinforce(rewards, mask, baseline="group")[1][:, 0].tolist() == [0.5, -0.5, 0]
    assert reinforce(rewards, mask, baseline="group", host="verl")[1][:, 0].tolist() == [0.5, -0.5, 4]


# ---- gapo_snr --------------------------------------------------------------------------------------------------------


def densest_center(values, share, center):
    x, m = sorted(values), max(1, math.ceil(share * len(values) - 1e-9))
    start = min(range(len(x) - m + 1), key=lambda s: (x[s + m - 1] - x[s], s))
    window = torch.tensor(x[start : start + m], dtype=torch.float64)
    middle = (window[(m - 1) // 2] + window[m // 2]) / 2
    return float(middle if center == "median" else window.mean())


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 3), st.one_of(EIGHTHS, st.floats(-3, 3), st.none())), min_size=1, max_size=24),
    st.sampled_from([0.1, 0.25, 0.5, 0.55, 0.8, 1.0]),
    st.sampled_from(["median", "mean"]),
)
def test_the_baseline_is_the_center_of_the_shortest_window_of_sorted_rewards(rows, share, center):
    group, reward = zip(*rows, strict=True)
    rewards = torch.tensor([math.nan if r is None else r for r in reward], dtype=torch.float64)
    batch = RolloutBatch(
        {"rewards": rewards, "group": torch.tensor(group), "response_mask": torch.ones(len(rows), 1).bool()}
    )
    baseline = create("advantage", "gapo_snr", share=share, center=center)(batch)["baseline"]
    for i, g in enumerate(group):
        values = [r for h, r in rows if h == g and r is not None]
        want = densest_center(values, share, center) if values else 0.0
        assert float(baseline[i]) == pytest.approx(want, abs=1e-9)


def test_a_share_that_rounding_lifts_above_a_whole_number_takes_no_further_reward():
    rewards = [0.0] * 7 + [float(k) for k in range(10, 28)]  # 0.28 * 25 = 7.000000000000001
    assert of_rewards("gapo_snr", rewards, share=0.28, center="mean")[0] == 0


@settings(max_examples=50, deadline=None)
@given(VARIED)
def test_the_squares_of_gapos_advantages_sum_to_n_minus_one(rewards):
    assert float(of_rewards("gapo_snr", rewards, eps=1e-12).square().sum()) == pytest.approx(len(rewards) - 1)


def test_gapo_over_the_whole_of_a_symmetric_group_is_grpo():
    rewards = [-2.0, -0.5, 0.0, 0.5, 2.0]
    same(of_rewards("gapo_snr", rewards, share=1.0), of_rewards("grpo", rewards))


def test_moving_an_outlier_further_away_moves_no_baseline():
    near, far = [0.1, 0.2, 0.25, 3.0], [0.1, 0.2, 0.25, 30.0]
    assert of_rewards("gapo_snr", near, normalize=False)[:3].tolist() == pytest.approx([-0.125, -0.025, 0.025])
    assert of_rewards("gapo_snr", far, normalize=False)[:3].tolist() == pytest.approx([-0.125, -0.025, 0.025])


def test_on_binary_rewards_gapo_updates_the_minority_only():
    assert of_rewards("gapo_snr", [1.0, 1.0, 1.0, 0.0]).tolist() == pytest.approx([0, 0, 0, -math.sqrt(3)], abs=1e-5)
    assert of_rewards("gapo_snr", [1.0, 1.0, 0.0, 0.0])[2:].tolist() == [0, 0]
