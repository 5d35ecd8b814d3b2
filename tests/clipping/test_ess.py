"""The effective sample size as cap and pull: its bounds, its reduction over ranks, and the mixture variant."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import rlx_plugins as rlx
from rlx_plugins.testing import evaluate
from rlx_plugins.testing.evaluation.building import run_loss

NAN = math.nan


def data(seed=0, rows=4, width=5, spread=0.5):
    g = torch.Generator().manual_seed(seed)
    old = -torch.rand(rows, width, generator=g, dtype=torch.float64) * 2
    return {
        "logp_new": old + spread * torch.randn(rows, width, generator=g, dtype=torch.float64),
        "logp_old": old,
        "advantages": torch.randn(rows, generator=g, dtype=torch.float64),
        "response_mask": (torch.arange(width) < torch.tensor([5, 2, 0, 4])[:, None]).double(),
    }


def run(d, **parameters):
    return evaluate("clip", "ess", d, parameters)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.floats(0.0, 3.0))
def test_it_is_one_over_one_plus_the_squared_variation_and_ignores_a_common_factor(seed, shift):
    d = data(seed)
    mask = d["response_mask"].bool()
    r = (d["logp_new"] - d["logp_old"])[mask].exp()
    ess = float(run(d)["ess"][0])
    assert ess == pytest.approx(float(1 / (1 + r.var(correction=0) / r.mean() ** 2)), abs=1e-6)
    assert 1 / len(r) - 1e-6 <= ess <= 1
    assert float(run(d | {"logp_new": d["logp_new"] + shift})["ess"][0]) == pytest.approx(ess, abs=1e-6)


def test_on_policy_it_is_the_plain_policy_gradient():
    d = data()
    out = run(d | {"logp_new": d["logp_old"]})
    want = -d["advantages"][:, None] * d["response_mask"] / d["response_mask"].sum()
    torch.testing.assert_close(out["grad_logp"], want, rtol=1e-7, atol=1e-10)
    assert out["ess"][0] == pytest.approx(1) and not out["kl"].any()


def test_a_token_the_behaviour_policy_gave_no_probability_leaves_the_loss_finite():
    """Its ratio is infinite, so the ESS is 1, the ratio is capped there, and there is no pull."""
    d = {"logp_new": [[-1.0, -2.0]], "logp_old": [[-math.inf, -2.5]], "advantages": [1.0], "response_mask": [[1, 1]]}
    out = run(d)
    assert out["ess"][0] == 1 and out["loss"] == pytest.approx(1.5)
    torch.testing.assert_close(out["grad_logp"], torch.tensor([[-0.5, -0.5]]).double())


@pytest.mark.parametrize("level", ["batch", "sequence"])
def test_the_gradient_is_the_closed_form_of_the_card(level):
    d = data(spread=1.0)
    out = run(d, level=level)
    ess, drift = out["ess"][:, None], d["logp_new"] - d["logp_old"]
    want = -out["rho"] * d["advantages"][:, None] + (1 - ess) * (1 - (-drift).exp())
    torch.testing.assert_close(out["grad_logp"], want * d["response_mask"] / d["response_mask"].sum())
    assert (out["rho"] <= ess + 1e-12).all() and (out["kl"] >= 0).all()


def test_rows_of_advantage_zero_feel_the_pull_in_the_direction_of_their_drift():
    d = data()
    out = run(d | {"advantages": torch.zeros(4)})
    drift = (d["logp_new"] - d["logp_old"]) * d["response_mask"]
    assert torch.equal(out["grad_logp"].sign(), drift.sign())


def test_one_outlier_leaves_almost_only_the_pull():
    d = data()
    d["logp_new"] = d["logp_old"].clone()
    d["logp_new"][0, 0] += 15.0
    assert run(d)["ess"][0] == pytest.approx(1 / 11, rel=1e-4)


def test_beyond_its_clamp_the_pull_is_linear():
    d = {"logp_new": [[-30.0, -1.0]], "logp_old": [[-1.0, -1.0]], "advantages": [0.0], "response_mask": [[1, 1]]}
    out = run(d)
    assert out["kl"][0, 0] == pytest.approx(-29 + math.exp(10) - 1)
    assert out["grad_logp"][0, 0] == pytest.approx(float(1 - out["ess"][0]) / 2)


@pytest.mark.parametrize("log_clamp", [None, 20.0])
def test_an_infinite_ratio_gives_size_one_unless_drifts_are_bounded(log_clamp):
    d = data()
    d["logp_old"][0, 0] = d["logp_new"][0, 0] - 800
    clip = rlx.create("clip", "ess", denominator="logp_old", log_clamp=log_clamp)
    out = run_loss({"clip": clip}, **d)
    assert (out["ess"] == 1) == (log_clamp is None)
    assert torch.isfinite(out["grad_logp"]).all()


def test_the_size_of_a_row_is_its_own_and_an_empty_row_has_one():
    d = data()
    out = run(d, level="sequence")
    alone = run({k: v[1:2] for k, v in d.items()})
    assert out["ess"][1] == pytest.approx(float(alone["ess"][0])) and out["ess"][2] == 1


def test_rows_spread_over_ranks_have_the_size_of_the_whole_batch():
    d = data()
    whole = run(d)
    sent, clip = [], rlx.create("clip", "ess", denominator="logp_old")

    def terms(rows, all_reduce):
        batch = rlx.RolloutBatch(
            {
                "response_mask": d["response_mask"][rows].bool(),
                "logp_old": d["logp_old"][rows],
                "group": torch.zeros(len(d["logp_old"][rows]), dtype=torch.int64),
            }
        )
        return rlx.PolicyTerms(
            d["logp_new"][rows], batch, advantages=d["advantages"][rows, None].expand(-1, 5), all_reduce=all_reduce
        )

    ranks = (slice(0, 1), slice(1, 4))
    for rows in ranks:
        clip(terms(rows, lambda x: sent.append(x) or x))
    assert len(sent) == 2 and sent[0].shape == sent[1].shape and sent[0].dtype == torch.float64
    loss = 0.0
    for rows in ranks:
        token_loss, metrics = clip(terms(rows, lambda x: sent[0] + sent[1]))
        assert metrics["ess"] == pytest.approx(float(whole["ess"][0]))
        loss += float((token_loss * d["response_mask"][rows]).sum() / d["response_mask"].sum())
    assert loss == pytest.approx(float(whole["loss"]))


def test_garbage_behind_the_mask_touches_neither_loss_nor_gradient():
    d = data()
    dirty = {k: torch.where(d["response_mask"].bool(), d[k], NAN) for k in ("logp_new", "logp_old")}
    for level in ("batch", "sequence"):
        clean, other = run(d, level=level), run(d | dirty, level=level)
        for name in ("loss", "grad_logp", "rho", "kl"):
            torch.testing.assert_close(other[name], clean[name])


def test_without_model_tokens_the_size_is_one_and_the_loss_zero():
    out = run(data() | {"response_mask": torch.zeros(4, 5)})
    assert out["loss"] == 0 and (out["ess"] == 1).all() and not out["grad_logp"].any()


def test_the_mixture_pulls_to_both_references_by_what_their_sizes_lack():
    d = data(1)
    prox = d["logp_old"] + 0.3 * torch.randn(4, 5, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    out = run(d | {"logp_prox": prox})
    behaviour, proximal = (float(run(d | {"logp_old": x})["ess"][0]) for x in (d["logp_old"], prox))
    size = min(behaviour, proximal)
    w_b, w_p = 1 - behaviour, 1 - proximal
    mixture = ((w_b * d["logp_old"].exp() + w_p * prox.exp()) / (w_b + w_p)).log()
    x = d["logp_new"] - mixture
    assert out["ess"][0] == pytest.approx(size)
    mask = d["response_mask"].bool()
    torch.testing.assert_close(out["kl"][mask], (x + (-x).exp() - 1)[mask])
    rho = (d["logp_new"] - d["logp_old"]).exp().clamp(max=size)
    want = -rho * d["advantages"][:, None] + (1 - size) * (1 - (-x).exp())
    torch.testing.assert_close(out["grad_logp"][mask], want[mask] / mask.sum())


def test_the_mixture_of_two_equal_policies_has_no_term_and_a_clean_gradient():
    d = data()
    out = run(d | {"logp_new": d["logp_old"], "logp_prox": d["logp_old"]})
    torch.testing.assert_close(
        out["grad_logp"],
        -d["advantages"][:, None] * d["response_mask"] / d["response_mask"].sum(),
        rtol=1e-7,
        atol=1e-9,
    )
