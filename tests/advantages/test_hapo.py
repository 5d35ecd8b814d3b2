"""HAPO: the average over tokens, the entropy score, and the redistribution inside the loss."""

import math

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import rlx_plugins as rlx
from rlx_plugins.testing import evaluate


def token_average(rewards, lengths, group=None, **params):
    """[B] advantages and the ids of groups that fell back to GRPO."""
    mask = (torch.arange(max(1, max(lengths))) < torch.tensor(lengths)[:, None]).double()
    group = [0] * len(rewards) if group is None else group
    out = evaluate(
        "advantage",
        "hapo",
        {"rewards": rewards, "group": group, "response_mask": mask, "entropy": torch.ones_like(mask)},
        params,
    )
    return out["advantages"][:, 0], out["fallback_groups"]


ROWS = st.lists(st.tuples(st.sampled_from([0.0, 0.5, 1.0]), st.integers(0, 9)), min_size=1, max_size=8)


@settings(max_examples=60, deadline=None)
@given(ROWS)
def test_rewards_are_scored_against_the_mean_and_spread_over_the_groups_tokens(rows):
    rewards, lengths = zip(*rows, strict=True)
    got, fallback = token_average(list(rewards), list(lengths))
    tokens = torch.tensor([r for r, n in rows for _ in range(n)], dtype=torch.float64)
    assume(not fallback and len(tokens))
    mean, std = tokens.mean(), tokens.std(correction=0)
    for i, (r, n) in enumerate(rows):
        assert float(got[i]) == pytest.approx(float((r - mean) / (std + 1e-6)) if n else 0.0, abs=1e-8)
    assert float((got * torch.tensor(lengths)).sum()) == pytest.approx(0, abs=1e-8)


def test_with_equal_lengths_it_is_grpo_with_the_population_spread():
    rewards = torch.tensor([1.0, 0.0, 0.5, 0.0], dtype=torch.float64)
    got, _ = token_average(rewards.tolist(), [3] * 4)
    torch.testing.assert_close(got, (rewards - rewards.mean()) / (rewards.std(correction=0) + 1e-6))


def test_an_extreme_imbalance_of_lengths_falls_back_to_grpo_over_the_rows_with_tokens():
    rewards, lengths, group = [1.0, 0.0, 0.0, 9.0, 1.0, 0.0], [1, 40, 40, 0, 2, 2], [4, 4, 4, 4, 8, 8]
    got, fallback = token_average(rewards, lengths, group)
    assert fallback == [4]
    third = torch.tensor([1.0, 0.0, 0.0], dtype=torch.float64)
    torch.testing.assert_close(got[:3], (third - third.mean()) / (third.std() + 1e-6))
    assert got[3] == 0 and got[4:].tolist() == pytest.approx([1, -1], abs=1e-5)
    unguarded, fallback = token_average(rewards, lengths, group, guard=100.0)
    assert fallback == [] and float(unguarded[0]) == pytest.approx(math.sqrt(80), rel=1e-4)


@pytest.mark.parametrize("reward", [0.1, 0.3, 1e6])
def test_equal_rewards_and_a_group_of_one_have_advantages_of_exactly_zero(reward):
    got, fallback = token_average([reward] * 4 + [2.0], [7, 3, 1, 5, 4], [0, 0, 0, 0, 1])
    assert got.tolist() == [0] * 5 and fallback == []


# ---- the score -------------------------------------------------------------------------------------------------------


def score(entropy, mask=None, **params):
    entropy = [entropy]
    mask = [[1] * len(entropy[0])] if mask is None else [mask]
    inputs = {"rewards": [1.0], "group": [0], "response_mask": mask, "entropy": entropy}
    return evaluate("advantage", "hapo", inputs, params)["h"][0]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(0, 4).map(lambda x: round(x, 2)), min_size=1, max_size=20), st.sampled_from([0, 0.3, 0.8, 1]))
def test_the_score_measures_log_entropy_from_its_quantile_in_units_of_the_extremes(entropy, rho):
    x = [math.log(max(h, 1e-8)) for h in entropy]
    m = sorted(x)[round(rho * (len(x) - 1))]
    up, down = max(x) - m, m - min(x)
    want = [(v - m) / up if v > m else (v - m) / down if v < m else 0.0 for v in x]
    assert score(entropy, rho=rho).tolist() == pytest.approx(want, abs=1e-9)
    assert score(entropy, rho=rho, repo_compat=True).tolist() == pytest.approx([abs(w) for w in want], abs=1e-9)


def test_equal_entropies_score_zero_and_so_do_masked_or_unknown_ones():
    assert score([0.7, 0.7, 0.7]).tolist() == [0, 0, 0]
    assert score([0.1, None, 9.0, 0.4], mask=[1, 1, 0, 1], rho=0.0).tolist() == [0, 0, 0, 1]
    assert score([1.0, 2.0], mask=[0, 0]).tolist() == [0, 0]


def test_at_the_highest_quantile_only_the_lower_side_exists():
    assert score([0.1, 1.0, 10.0], rho=1.0).tolist() == pytest.approx([-1, -0.5, 0])


# ---- the redistribution ----------------------------------------------------------------------------------------------


def redistributed(h, ratio, **params):
    """A' / A of tokens with these scores (among -1, 1 and 0) and ratios."""
    count = len(h)
    batch = rlx.RolloutBatch(
        {
            "response_mask": torch.ones(1, count, dtype=torch.bool),
            "group": torch.zeros(1, dtype=torch.int64),
            "logp_old": torch.zeros(1, count, dtype=torch.float64),
            "entropy_score": torch.tensor([h], dtype=torch.float64),
        }
    )
    logp_new = torch.tensor([ratio], dtype=torch.float64).log().requires_grad_()
    terms = rlx.PolicyTerms(logp_new, batch, advantages=torch.full((1, count), 2.0, dtype=torch.float64))
    out = rlx.create("advantage", "hapo", **params).in_loss(terms)
    assert not out.requires_grad
    return (out[0] / 2).tolist()


def test_uncertain_tokens_are_amplified_once_they_have_moved_by_half_the_range():
    # eps_high (1 + h) / 2 = 0.15 above 1, eps_low / 2 = 0.1 below
    got = redistributed([0.5] * 5, [1.0, 1.14, 1.16, 0.91, 0.89])
    assert got == pytest.approx([1, 1, 1.5, 1, 1.5])


def test_confident_tokens_are_damped_while_they_have_hardly_moved():
    # eps_low (1 - h) / 2 = 0.15 below 1, eps_high / 2 = 0.1 above
    got = redistributed([-0.5] * 5, [1.0, 1.09, 1.11, 0.86, 0.84])
    assert got == pytest.approx([0.5, 0.5, 1, 0.5, 1])
    assert redistributed([-1.0], [1.0]) == [0]


def test_alpha_sets_how_far_the_half_range_reaches_and_beta_how_strongly_it_acts():
    assert redistributed([0.5], [1.11], alpha=0.0, beta=0.4) == pytest.approx([1.2])
    assert redistributed([0.5], [1.11], alpha=1.0, beta=0.4) == pytest.approx([1.0])


def test_a_ratio_exactly_on_the_half_range_is_outside():
    assert redistributed([-0.5], [1.25], eps_high=0.5) == [1]
    assert redistributed([1.0], [1.25], eps_high=0.5, alpha=0.0) == [2]
    assert redistributed([-1.0], [0.75], eps_low=0.5, alpha=0.0) == [1]
    assert redistributed([1.0], [0.75], eps_low=0.5, alpha=0.0) == [2]


def test_without_beta_nothing_is_left_to_do_in_the_loss():
    assert redistributed([1.0, -1.0], [1.5, 1.0], beta=0.0) == [1, 1]
    part = rlx.create("advantage", "hapo", beta=0.0)
    assert "in_loss" in part.idle_hooks and not rlx.create("advantage", "hapo").idle_hooks


def test_the_released_scope_scores_the_current_forward_within_the_micro_batch():
    part = rlx.create("advantage", "hapo", statistics="micro", quantile=0.0)
    batch = rlx.RolloutBatch(
        {
            "response_mask": torch.tensor([[True, True, False]]),
            "group": torch.zeros(1, dtype=torch.int64),
            "logp_old": torch.zeros(1, 3),
            "entropy_score": torch.full((1, 3), torch.nan),
        }
    )
    entropy = torch.tensor([[0.1, 1.0, torch.nan]], requires_grad=True)
    terms = rlx.PolicyTerms(torch.ones(1, 3), batch, entropy=entropy, advantages=torch.ones(1, 3))
    assert part.in_loss(terms).tolist()[0][:2] == [1, 2]
    assert part.scope == "micro" and rlx.create("advantage", "hapo").scope == "batch"


def test_another_estimators_advantages_can_be_redistributed():
    mask = torch.ones(2, 1, dtype=torch.bool)
    batch = rlx.RolloutBatch(
        {
            "rewards": torch.tensor([3.0, 0.0]),
            "group": torch.tensor([0, 0]),
            "response_mask": mask,
            "entropy": torch.tensor([[0.1], [1.0]]),
        }
    )
    columns = rlx.create("advantage", "hapo", base="dr_grpo", quantile=0.0)(batch)
    assert columns["advantages"].tolist() == [[1.5], [-1.5]] and columns["entropy_score"].tolist() == [[0], [1]]


# ---- the whole method ------------------------------------------------------------------------------------------------


def test_the_method_gives_both_parts_one_range_and_the_loss_its_score():
    host = rlx.HostProfile("any", signals=frozenset({"logp_old", "entropy"}))
    method = {"name": "hapo", "eps_low": 0.3, "alpha": 0.5, "quantile": 0.5, "beta": 0.8}
    parts = rlx.build({"method": method}, host)
    credit, clip = parts.one("advantage"), parts.one("clip")
    assert (credit.eps_low, credit.alpha, credit.quantile, credit.beta) == (0.3, 0.5, 0.5, 0.8)
    assert (clip.eps_low, clip.alpha, clip.dual_clip) == (0.3, 0.5, 10.0)
    batch = rlx.RolloutBatch(
        {
            "rewards": torch.tensor([1.0, 0.0], dtype=torch.float64),
            "group": torch.tensor([0, 0]),
            "response_mask": torch.ones(2, 2, dtype=torch.bool),
            "keep": torch.ones(2, dtype=torch.bool),
            "logp_old": torch.zeros(2, 2, dtype=torch.float64),
            "entropy": torch.tensor([[0.1, 1.0], [1.0, 10.0]], dtype=torch.float64),
        }
    )
    ready = rlx.prepare(parts, batch).batch
    assert ready.entropy_score.tolist() == [[-1, 0], [0, 1]]
    logp_new = torch.tensor([[0.0, 0.0], [0.0, -1.0]], dtype=torch.float64, requires_grad=True)
    loss, _ = rlx.policy_loss(parts, ready, logp_new, totals={"policy": 4.0})
    (gradient,) = torch.autograd.grad(loss, logp_new)
    # the confident token, at ratio 1, keeps 1 - beta; the uncertain one that fell is amplified, and clipped (A < 0)
    assert gradient.tolist()[0] == pytest.approx([-0.2 / 4, -1 / 4], abs=1e-5)
    assert gradient.tolist()[1] == pytest.approx([1 / 4, 0], abs=1e-5)
    assert float(loss.detach()) == pytest.approx((-0.2 - 1 + 1 + 1.8 * 0.7) / 4, abs=1e-5)


def test_the_clip_without_the_score_is_refused():
    host = rlx.HostProfile("any", signals=frozenset({"logp_old", "entropy"}))
    with pytest.raises(rlx.ConfigError, match="clip hapo needs the signal 'entropy_score'"):
        rlx.build({"clip": "hapo"}, host)
    rlx.build({"clip": {"name": "hapo", "statistics": "micro"}}, host)


def test_the_loss_is_the_same_however_the_rows_are_split_into_micro_batches():
    host = rlx.HostProfile("any", signals=frozenset({"logp_old", "entropy"}))
    parts = rlx.build({"method": {"name": "hapo", "quantile": 0.5}}, host)
    generator = torch.Generator().manual_seed(3)
    rows, width = 6, 5
    noise = torch.randn(2, rows, width, generator=generator, dtype=torch.float64)
    batch = rlx.RolloutBatch(
        {
            "rewards": torch.tensor([1.0, 0.0, 0.0, 1.0, 1.0, 0.0], dtype=torch.float64),
            "group": torch.tensor([0, 1, 0, 1, 0, 1]),
            "response_mask": torch.arange(width) < torch.tensor([[5], [3], [1], [0], [4], [2]]),
            "keep": torch.ones(rows, dtype=torch.bool),
            "logp_old": torch.full((rows, width), -1.0, dtype=torch.float64),
            "entropy": noise[0].exp(),
        }
    )
    ready = rlx.prepare(parts, batch).batch
    logp_new = (-1 + noise[1] / 4).requires_grad_()
    totals = {"policy": ready.loss_count.sum()}
    whole, _ = rlx.policy_loss(parts, ready, logp_new, totals=totals)
    split = [
        rlx.policy_loss(parts, ready.rows(part), logp_new[part], totals=totals)[0]
        for part in (torch.tensor([0, 5, 3]), torch.tensor([1]), torch.tensor([2, 4]))
    ]
    torch.testing.assert_close(sum(split), whole)
    for got, want in zip(torch.autograd.grad(sum(split), logp_new), torch.autograd.grad(whole, logp_new), strict=True):
        torch.testing.assert_close(got, want)
