"""Adaptive importance sampling: the mixing coefficient, its state, and weights between 1 and the truncated ratio."""

import pytest
import torch

import rlx_plugins as rlx
from rlx_plugins.testing import evaluate
from rlx_plugins.testing.evaluation.building import reward_batch


def batch_of(d, mask=None):
    d = torch.as_tensor(d, dtype=torch.float64)
    mask = torch.ones(d.shape) if mask is None else torch.as_tensor(mask)
    return reward_batch(response_mask=mask.double()).with_columns(logp_old=torch.zeros_like(d), logp_rollout=-d)


def noise(scale=0.3, shape=(4, 6)):
    return torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * scale


@pytest.mark.parametrize("combine", ["noisy_or", "mean"])
def test_without_mismatch_alpha_is_exactly_zero(combine):
    part = rlx.create("correction", "ais", combine=combine)
    assert (part(batch_of(torch.zeros(2, 3)))["weight"] == 1).all() and part.alpha == 0


def test_alpha_grows_with_the_mismatch_and_the_weights_lie_between_one_and_the_truncated_ratio():
    alphas = []
    for scale in (0.01, 0.1, 0.3, 1.0, 3.0):
        part = rlx.create("correction", "ais")
        w = part(batch_of(noise(scale)))["weight"]
        target = noise(scale).exp().clamp(max=2.0)
        assert ((w - 1) * (w - target) <= 1e-12).all()
        alphas.append(part.alpha)
    assert alphas == sorted(alphas) and len(set(alphas)) == 5 and 0 < alphas[0] and alphas[-1] <= 1


def test_the_three_scores_are_combined_by_hand():
    # x = (2, 1/2): ESS = 1.5625/2.125, CV = 0.6, KL = mean(x - 1) = 0.25 as the logs cancel
    part = rlx.create("correction", "ais", power_ess=2.0, power_kl=0.5, kl_scale=0.25, combine="mean", upper=1.6)
    d = torch.tensor([[2.0, 0.5]]).double().log()
    w = part(batch_of(d))["weight"]
    s1, s2, s3 = (1 - 1.5625 / 2.125) ** 2, (1 - torch.tensor(-1.0).exp().item()) ** 0.5, 0.6 / 1.6
    alpha = (s1 + s2 + s3) / 3
    assert part.alpha == pytest.approx(alpha, rel=1e-6)
    assert w[0].tolist() == pytest.approx([1 + alpha * 0.6, 1 - alpha * 0.5], rel=1e-6)


def test_full_mixing_is_token_level_tis():
    part = rlx.create("correction", "ais", kl_scale=1e-12)  # any mismatch saturates the divergence score
    tis = rlx.create("correction", "tis")
    batch = batch_of(noise())
    torch.testing.assert_close(part(batch)["weight"], tis(batch)["weight"])


def test_the_effective_sample_size_is_one_over_one_plus_cv_squared():
    found = rlx.create("correction", "ais").diagnose(batch_of(noise(0.8)))
    assert found.ess == pytest.approx(1 / (1 + found.cv**2))


def test_one_extreme_ratio_is_capped_and_drives_alpha_to_one():
    d = torch.zeros(10, 10).double()
    d[0, 0] = 60.0
    out = evaluate("correction", "ais", {"logp_old": d, "logp_rollout": 0 * d, "response_mask": torch.ones(10, 10)})
    assert out["ess"] == pytest.approx(1 / 100, rel=1e-3) and out["alpha"] == pytest.approx(1)
    assert out["weights"].max() == pytest.approx(2.0)


def test_the_result_does_not_depend_on_how_tokens_lie_in_rows():
    d = noise()
    mask = torch.ones(4, 6)
    mask[1, 2:] = 0
    flat = d[mask.bool()][:, None]
    one, other = rlx.create("correction", "ais"), rlx.create("correction", "ais")
    w = one(batch_of(torch.where(mask.bool(), d, torch.nan), mask))["weight"]
    torch.testing.assert_close(w[mask.bool()], other(batch_of(flat))["weight"][:, 0])
    assert one.alpha == pytest.approx(other.alpha) and not w[~mask.bool()].any()


def test_a_token_the_engine_could_not_score_counts_as_no_mismatch():
    known, unknown = batch_of([[0.3, 0.0, -0.4]]), batch_of([[0.3, float("nan"), -0.4]])
    w = [rlx.create("correction", "ais")(b)["weight"] for b in (known, unknown)]
    torch.testing.assert_close(w[0], w[1])


def test_alpha_is_smoothed_over_steps_and_survives_a_restart():
    raw = [rlx.create("correction", "ais") for _ in range(2)]
    for part, scale in zip(raw, (0.2, 0.6), strict=True):
        part(batch_of(noise(scale)))
    first = rlx.create("correction", "ais", ema=0.75)
    first(batch_of(noise(0.2)))
    assert first.alpha == raw[0].alpha, "nothing to smooth with yet"
    resumed = rlx.create("correction", "ais", ema=0.75)
    resumed.load_state_dict(first.state_dict())
    for part in (first, resumed):
        part(batch_of(noise(0.6)))
        assert part.alpha == pytest.approx(0.75 * raw[0].alpha + 0.25 * raw[1].alpha)


@pytest.mark.parametrize("before", [None, 0.4])
def test_a_batch_without_model_tokens_keeps_alpha(before):
    inputs = {"logp_old": [[0.0]], "logp_rollout": [[None]], "response_mask": [[0]]}
    out = evaluate("correction", "ais", inputs, {"prev_alpha": before})
    assert (out["alpha"], out["ess"], out["kl"], out["cv"]) == (before or 0.0, 1.0, 0.0, 0.0)
    assert not out["weights"].any()
