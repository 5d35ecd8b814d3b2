"""Masked importance sampling: bands, veto, denominators, and parity with verl's weights and rejection masks."""

import math

import pytest
import torch

import rlx_plugins as rlx
from rlx_plugins.testing.evaluation.building import reward_batch

NAN = math.nan
MASK = torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0], [0, 0, 0, 0]])
D = torch.tensor([[0.1, -0.3, 0.8, NAN], [-0.2, 0.4, NAN, NAN], [NAN, NAN, NAN, NAN]]).double()


def batch_of(d, mask=MASK):
    d = torch.as_tensor(d, dtype=torch.float64)
    old = torch.full_like(d, -1)
    return reward_batch(response_mask=mask.double()).with_columns(logp_old=old, logp_rollout=old - d)


def run(d=D, mask=MASK, **parameters):
    return rlx.create("correction", "mis", **parameters)(batch_of(d, mask))


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
def test_without_mismatch_everything_is_kept_with_weight_one(level):
    out = run(torch.zeros(3, 4), level=level)
    torch.testing.assert_close(out["weight"], MASK.double())
    assert out["kept_tokens"] == 1 and out["kept_rows"] == 1


def test_a_weight_on_a_bound_is_inside():
    torch.testing.assert_close(run(torch.zeros(3, 4), lower=1.0, upper=1.0)["weight"], MASK.double())


def test_tokens_outside_the_band_weigh_nothing():
    out = run(lower=math.exp(-0.31), upper=math.exp(0.41))
    want = [[math.exp(0.1), math.exp(-0.3), 0, 0], [math.exp(-0.2), math.exp(0.4), 0, 0], [0, 0, 0, 0]]
    torch.testing.assert_close(out["weight"], torch.tensor(want).double())
    assert out["kept_tokens"] == pytest.approx(4 / 5) and out["kept_rows"] == 1


@pytest.mark.parametrize(("level", "logs"), [("sequence", [0.6, 0.2]), ("geometric", [0.2, 0.1])])
def test_a_row_is_judged_and_weighed_as_a_whole(level, logs):
    out = run(level=level, lower=None, upper=math.exp((logs[0] + logs[1]) / 2))
    want = torch.tensor([[0.0] * 4, [math.exp(logs[1])] * 2 + [0, 0], [0.0] * 4]).double()
    torch.testing.assert_close(out["weight"], want)
    assert out["kept_rows"] == pytest.approx(1 / 2) and out["kept_tokens"] == pytest.approx(2 / 5)


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
def test_one_impossible_token_vetoes_its_row_alone(level):
    d = torch.tensor([[0.1, -10.0, 9.9, 0.0], [-0.2, 0.2, NAN, NAN], [NAN] * 4]).double()
    without, vetoed = (run(d, level=level, lower=0.0, upper=1e9, veto=v)["weight"] for v in (None, 1e-4))
    assert not vetoed[0].any() and without[0, 0] > 0
    torch.testing.assert_close(vetoed[1:], without[1:])
    torch.testing.assert_close(run(d, level=level, lower=0.0, upper=1e9, veto=1e-5)["weight"], without)


def test_a_token_without_an_engine_log_prob_has_weight_one_and_is_not_vetoed():
    d = torch.zeros(3, 4).double()
    d[0, 1] = NAN
    d[1, 0] = -math.inf
    torch.testing.assert_close(run(d, lower=0.9, upper=1.1, veto=0.5)["weight"], MASK.double())


def test_masking_alone_keeps_ones_and_may_stand_beside_another_correction():
    out = run(lower=0.8, upper=1.3, use_weight=False)
    assert out["weight"].tolist() == [[1, 0, 0, 0], [1, 0, 0, 0], [0, 0, 0, 0]]
    host = rlx.HostProfile("any", frozenset({"logp_old", "logp_rollout"}))
    rlx.build({"correction": ["tis", {"name": "mis", "use_weight": False}]}, host)
    with pytest.raises(rlx.ConfigError, match="both weigh tokens for the same mismatch"):
        rlx.build({"correction": ["tis", "mis"]}, host)


def test_widening_the_band_never_loses_a_token():
    kept = [
        (run(lower=low, upper=high)["weight"] > 0) for low, high in [(0.95, 1.05), (0.8, 1.3), (0.7, 1.6), (0.1, 3.0)]
    ]
    for narrow, wide in zip(kept, kept[1:], strict=False):
        assert (wide | ~narrow).all() and wide.sum() > narrow.sum()


def loss_of(mode, d=D, **parameters):
    host = rlx.HostProfile("any", frozenset({"logp_old", "logp_rollout"}))
    parts = rlx.build({"correction": {"name": "mis", "mode": mode, **parameters}, "advantage": "grpo"}, host)
    batch = batch_of(d).with_columns(rewards=torch.tensor([1.0, 0.0, 0.5]).double())
    ready = rlx.prepare(parts, batch).batch
    new = (ready.logp_old + 0.01).requires_grad_()
    totals = {"policy": ready.loss_count.sum()}
    loss = rlx.policy_loss(parts, ready, new, totals=totals)[0]
    return loss, float(totals["policy"]), torch.autograd.grad(loss, new)[0]


def test_both_ways_of_dropping_have_one_numerator_and_differ_in_the_denominator():
    band = {"lower": 0.8, "upper": 1.3}
    zero, n_zero, grad_zero = loss_of("zero_weight", **band)
    drop, n_drop, grad_drop = loss_of("drop_mask", **band)
    assert (n_zero, n_drop) == (5, 2)
    torch.testing.assert_close(zero * n_zero, drop * n_drop)
    torch.testing.assert_close(grad_zero * n_zero, grad_drop * n_drop)
    assert grad_drop.abs().sum() > 0


def test_a_batch_with_nothing_left_has_loss_zero():
    for mode in ("zero_weight", "drop_mask"):
        loss, _, grad = loss_of(mode, d=torch.full((3, 4), 5.0))
        assert loss == 0 and not grad.any()


def test_bounds_in_the_wrong_order_are_refused():
    with pytest.raises(rlx.ConfigError, match=r"mis\.lower: must be <= upper"):
        rlx.create("correction", "mis", lower=3.0)


def random_d():
    g = torch.Generator().manual_seed(1)
    d, mask = torch.randn(6, 7, generator=g, dtype=torch.float64) * 0.25, (torch.rand(6, 7, generator=g) < 0.7).long()
    mask[3] = 0
    return d, mask


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_the_weights_are_verls_banded_ones(level):
    helper = pytest.importorskip("verl.trainer.ppo.rollout_corr_helper")
    d, mask = random_d()
    low, high = (0.8, 1.3) if level == "token" else (0.65, 2.0)
    want, _ = helper.compute_rollout_correction_weights(d, mask, level, f"{low}_{high}")
    out = run(d, mask, level=level, lower=low, upper=high)["weight"]
    torch.testing.assert_close(out, want)
    assert 0 < (out > 0).sum() < mask.sum()


@pytest.mark.parametrize(
    ("level", "option"), [("token", "token_k1"), ("sequence", "seq_sum_k1"), ("geometric", "seq_mean_k1")]
)
def test_the_mask_is_verls_rejection_whose_bounds_are_of_rollout_over_trainer(level, option):
    helper = pytest.importorskip("verl.trainer.ppo.rollout_corr_helper")
    d, mask = random_d()
    low, high = (0.95, 1.1) if level == "geometric" else (0.8, 1.5)
    want, _ = helper.compute_rollout_rejection_mask(d, mask, option, f"{low}_{high}")
    out = run(d, mask, level=level, lower=1 / high, upper=1 / low, mode="drop_mask")["response_mask"]
    assert torch.equal(out.long(), want.long()) and 0 < out.sum() < mask.sum()
