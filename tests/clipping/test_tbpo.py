"""TBPO: the two-sided sequence clip, the mismatch band, and where it is GSPO."""

import math

import pytest
import torch

import rlx_plugins as rlx
from rlx_plugins.testing import evaluate
from rlx_plugins.testing.evaluation.building import run_loss

NAN, INF = math.nan, math.inf
WIDE = {"eps_low": 0.2, "eps_high": 0.2, "eps_neg_high": 0.2}


def data(seed=0, rows=6, width=5, spread=0.3):
    g = torch.Generator().manual_seed(seed)
    old = -torch.rand(rows, width, generator=g, dtype=torch.float64) - 0.5
    mask = torch.arange(width) < torch.tensor([5, 3, 1, 4, 0, 2])[:, None]
    return {
        "logp_new": old + spread * torch.randn(rows, width, generator=g, dtype=torch.float64),
        "logp_old": old,
        "logp_rollout": old + 0.2 * torch.randn(rows, width, generator=g, dtype=torch.float64),
        "advantages": torch.tensor([1.0, -1.0, 0.5, -2.0, 1.0, 0.0]).double(),
        "response_mask": mask,
    }


def row(log_ratio, advantage, mismatch=0.0, **parameters):
    """One rollout of two tokens."""
    d = {
        "logp_new": [[log_ratio - 1, log_ratio - 1]],
        "logp_old": [[-1.0, -1.0]],
        "logp_rollout": [[-1.0 - mismatch, -1.0 - mismatch]],
        "advantages": [advantage],
        "response_mask": [[1, 1]],
    }
    return evaluate("clip", "tbpo", d, WIDE | parameters)


def test_on_policy_without_mismatch_every_rollout_has_the_plain_gradient():
    d = data()
    out = evaluate("clip", "tbpo", d | {"logp_new": d["logp_old"], "logp_rollout": d["logp_old"]})
    n = d["response_mask"].sum(1, keepdim=True)
    want = torch.where(d["response_mask"], -d["advantages"][:, None] / n.clamp(min=1) / 5, 0.0)
    torch.testing.assert_close(out["grad_logp"], want)


def test_the_gradient_is_the_closed_form_of_the_card():
    d = data()
    out = evaluate("clip", "tbpo", d, WIDE)
    scale = -out["mismatch_weight"] * d["advantages"] * out["seq_ratio"] * out["grad_on"]
    n = d["response_mask"].sum(1).clamp(min=1)
    torch.testing.assert_close(out["grad_logp"], d["response_mask"] * (scale / n / 5)[:, None])
    assert 0 < out["grad_on"].sum() < 5
    torch.testing.assert_close(out["loss"], out["per_seq_loss"].sum() / 5)


@pytest.mark.parametrize("log_ratio", [0.5, 5.0, 19.0])
def test_a_failure_that_became_more_likely_is_bounded_and_has_no_gradient(log_ratio):
    out = row(log_ratio, -3.0)
    assert not out["grad_logp"].any()
    assert out["per_seq_loss"].tolist() == pytest.approx([3.0 * 1.2])


@pytest.mark.parametrize(
    ("log_ratio", "advantage", "on"), [(-1.0, -1.0, 0), (-1.0, 1.0, 1), (1.0, 1.0, 0), (0.1, 1.0, 1), (0.1, -1.0, 1)]
)
def test_which_rollouts_keep_their_gradient(log_ratio, advantage, on):
    out = row(log_ratio, advantage)
    assert out["grad_on"] == on and bool(out["grad_logp"].any()) == bool(on)


def test_without_the_negative_bound_and_mismatch_it_is_gspo():
    d = data()
    d["logp_rollout"] = d["logp_old"]
    out = evaluate("clip", "tbpo", d, WIDE | {"eps_neg_high": INF})
    gspo = run_loss(
        {
            "ratio": rlx.create("ratio", "sequence", gradient="sequence"),
            "clip": rlx.create("clip", "ppo", eps_low=0.2, eps_high=0.2),
        },
        agg="seq-mean-token-mean",
        **d,
    )
    up = d["advantages"] >= 0
    torch.testing.assert_close(out["grad_logp"][up], gspo["grad_logp"][up])
    inside = (gspo["ratio"] >= 0.8).all(1)  # below, GSPO's value stays as well but its gradient is gone too
    torch.testing.assert_close(out["grad_logp"][inside], gspo["grad_logp"][inside])
    torch.testing.assert_close(out["loss"], gspo["loss"])


def test_rollouts_outside_the_band_or_of_unknown_mismatch_are_dropped_but_stay_in_the_count():
    d = data()
    d["logp_rollout"] = d["logp_old"].clone()
    d["logp_rollout"][0, :5] -= math.log(2.1)
    d["logp_rollout"][1, 0] = NAN
    out = evaluate("clip", "tbpo", d, WIDE)
    assert out["keep"].tolist() == [0, 0, 1, 1, 0, 1]
    assert not out["grad_logp"][:2].any() and not out["per_seq_loss"][:2].any()
    assert out["outside_band"] == pytest.approx(1 / 5) and out["unknown"] == pytest.approx(1 / 5)
    torch.testing.assert_close(out["loss"], out["per_seq_loss"].sum() / 5)


@pytest.mark.parametrize("bound", [2.0, 0.5])
def test_a_mismatch_on_the_band_is_inside(bound):
    assert row(0.0, 1.0, math.log(bound), band_low=bound, band_high=bound)["keep"] == 1


def test_the_order_of_tokens_in_a_row_does_not_matter():
    d = data()
    d["response_mask"] = torch.ones(6, 5)
    order = torch.tensor([3, 1, 4, 0, 2])
    flipped = {k: v[:, order] if v.ndim == 2 else v for k, v in d.items()}
    torch.testing.assert_close(evaluate("clip", "tbpo", flipped)["loss"], evaluate("clip", "tbpo", d)["loss"])


def test_token_advantages_count_with_their_mean_over_the_row():
    d = data()
    tokens = d["advantages"][:, None] + torch.tensor([-1.0, 1.0, 0.0, 0.0, 0.0]).double() * (
        d["response_mask"].sum(1, keepdim=True) >= 2
    )
    torch.testing.assert_close(
        evaluate("clip", "tbpo", d | {"advantages": tokens})["loss"], evaluate("clip", "tbpo", d)["loss"]
    )


def test_garbage_behind_the_mask_touches_neither_loss_nor_gradient():
    d = data()
    dirty = {k: torch.where(d["response_mask"], d[k], NAN) for k in ("logp_new", "logp_old", "logp_rollout")}
    clean, other = evaluate("clip", "tbpo", d, WIDE), evaluate("clip", "tbpo", d | dirty, WIDE)
    for name in ("loss", "grad_logp", "mismatch_weight", "per_seq_loss"):
        torch.testing.assert_close(other[name], clean[name])


def test_without_model_tokens_the_loss_is_zero():
    out = evaluate("clip", "tbpo", data() | {"response_mask": torch.zeros(6, 5)})
    assert out["loss"] == 0 and not out["grad_logp"].any() and not out["keep"].any()


def test_a_second_weight_for_the_same_mismatch_and_another_aggregate_are_refused():
    host = rlx.HostProfile("any", frozenset({"logp_old", "logp_rollout"}))
    with pytest.raises(rlx.ConfigError, match="clip tbpo already divides by logp_rollout"):
        rlx.build({"clip": "tbpo", "correction": "tis"}, host)
    with pytest.raises(rlx.ConfigError, match="clip tbpo works with aggregate=seq_mean_token_mean only"):
        rlx.build({"clip": "tbpo", "aggregate": "token_mean"}, host)
    with pytest.raises(rlx.ConfigError, match=r"tbpo\.band_low: must be <= band_high"):
        rlx.create("clip", "tbpo", band_low=3.0)
