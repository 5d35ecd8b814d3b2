"""Truncated importance weights: levels, truncation, unknown log-probs, normalisation, and parity with verl."""

import pytest
import torch

import rlx_plugins as rlx
from rlx_plugins.testing import evaluate
from rlx_plugins.testing.evaluation.building import reward_batch

NAN = float("nan")
MASK = torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0], [0, 0, 0, 0]])


def batch_of(d, mask=MASK, dtype=torch.float64):
    d = torch.as_tensor(d, dtype=dtype)
    old = torch.full_like(d, -1)
    return reward_batch(response_mask=mask.double()).with_columns(logp_old=old, logp_rollout=old - d)


def weights(d, mask=MASK, **parameters):
    return rlx.create("correction", "tis", **parameters)(batch_of(d, mask))["weight"]


D = [[0.1, -0.3, 0.8, NAN], [-0.2, 0.4, NAN, NAN], [NAN, NAN, NAN, NAN]]


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
def test_without_mismatch_every_model_token_weighs_one(level):
    torch.testing.assert_close(weights(torch.zeros(3, 4), level=level), MASK.double())


def test_sequence_and_geometric_weights_are_constant_along_a_row_and_powers_of_each_other():
    sequence, geometric = (weights(D, level=x, upper=1e9) for x in ("sequence", "geometric"))
    torch.testing.assert_close(sequence[0, :3], torch.full((3,), 0.6).double().exp())
    torch.testing.assert_close(geometric[0] ** 3, sequence[0])
    torch.testing.assert_close(geometric[1] ** 2, sequence[1])


def test_weights_are_clamped_on_both_sides_and_zero_where_masked():
    w = weights(D, upper=1.5, lower=0.8)
    want = torch.tensor([0.1, -0.3, 0.8]).double().exp().clamp(0.8, 1.5)
    torch.testing.assert_close(w[0, :3], want)
    assert not w[~MASK.bool()].any()


def test_the_log_weight_is_clamped_before_exp():
    assert weights([[900.0]], torch.ones(1, 1), upper=float("inf"))[0, 0] == torch.tensor(20.0).double().exp()


@pytest.mark.parametrize("unknown", [NAN, float("inf"), -float("inf")])
def test_a_token_without_an_engine_log_prob_weighs_one_or_is_dropped(unknown):
    d = [[0.2, unknown, 0.4, 0.0]]
    mask = torch.tensor([[1, 1, 1, 0]])
    assert weights(d, mask)[0, 1] == 1
    assert weights(d, mask, nan_policy="drop")[0, 1] == 0
    one, drop = (weights(d, mask, level="geometric", nan_policy=x)[0, 0].log() for x in ("one", "drop"))
    assert float(one) == pytest.approx(0.2) and float(drop) == pytest.approx(0.3), "drop leaves the row's mean"


def test_importance_weighting_is_unbiased_for_a_response_of_one_token():
    old, rollout = torch.tensor([0.5, 0.3, 0.2]).double(), torch.tensor([0.2, 0.3, 0.5]).double()
    batch = reward_batch(response_mask=[[1]] * 3).with_columns(
        logp_old=old.log()[:, None], logp_rollout=rollout.log()[:, None]
    )
    w = rlx.create("correction", "tis", upper=float("inf"))(batch)["weight"][:, 0]
    f = torch.tensor([1.0, -2.0, 5.0]).double()
    torch.testing.assert_close((rollout * w * f).sum(), (old * f).sum())


def test_normalised_weights_have_mean_one_over_tokens_or_over_rows():
    w = weights(D, upper=1.2, batch_normalize=True)
    assert float(w[MASK.bool()].mean()) == pytest.approx(1)
    w = weights(D, level="sequence", upper=1.3, batch_normalize=True)
    assert float(w[:2, 0].mean()) == pytest.approx(1), "rows of 3 and 2 tokens count the same, the empty one does not"


def test_normalisation_is_skipped_when_nothing_is_left_to_divide_by():
    w = weights([[-20.0, -19.9]], torch.ones(1, 2), batch_normalize=True)
    assert float(w.max()) < 1e-8
    assert not weights(torch.zeros(2, 2), torch.zeros(2, 2), batch_normalize=True).any()


def test_all_weights_at_the_cap_are_a_constant_that_normalisation_removes():
    assert (weights(torch.full((1, 3), 2.0), torch.ones(1, 3), upper=1.5) == 1.5).all()
    assert (weights(torch.full((1, 3), 2.0), torch.ones(1, 3), upper=1.5, batch_normalize=True) == 1).all()


def test_bfloat16_log_probs_give_float32_weights():
    w = rlx.create("correction", "tis")(batch_of(torch.zeros(3, 4), dtype=torch.bfloat16))["weight"]
    assert w.dtype == torch.float32


def test_an_empty_batch_has_no_truncated_token():
    out = evaluate("correction", "tis", {"logp_old": [[0.0]], "logp_rollout": [[1.0]], "response_mask": [[0]]})
    assert out["frac_truncated"] == 0 and out["ess"] == 1 and not out["weights"].any()


def test_it_is_refused_beside_a_ratio_that_already_divides_by_the_engine():
    host = rlx.HostProfile("any", signals=frozenset({"logp_old", "logp_rollout"}))
    config = {"correction": "tis", "ratio": {"name": "token", "denominator": "logp_rollout"}}
    with pytest.raises(rlx.ConfigError, match="the mismatch would count twice"):
        rlx.build(config, host)
    with pytest.raises(rlx.ConfigError, match="both weigh tokens for the same mismatch"):
        rlx.build({"correction": ["tis", "ais"]}, host)


def test_a_lower_bound_above_the_upper_one_is_refused():
    with pytest.raises(rlx.ConfigError, match="tis.lower: must be <= upper"):
        rlx.create("correction", "tis", lower=3.0)


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_the_weights_are_verls(level, normalize):
    helper = pytest.importorskip("verl.trainer.ppo.rollout_corr_helper")
    g = torch.Generator().manual_seed(1)
    d, mask = torch.randn(5, 7, generator=g, dtype=torch.float64), (torch.rand(5, 7, generator=g) < 0.7).long()
    mask[3] = 0
    want, metrics = helper.compute_rollout_correction_weights(d, mask, level, 1.7, normalize)
    batch = batch_of(d, mask)
    part = rlx.create("correction", "tis", level=level, upper=1.7, batch_normalize=normalize)
    torch.testing.assert_close(part(batch)["weight"], want)
    plain = part.replace(batch_normalize=False).truncate(batch)
    assert float(plain.effective_sample_size()) == pytest.approx(metrics["rollout_is_eff_sample_size"], rel=1e-6)
