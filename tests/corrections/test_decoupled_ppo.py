"""Decoupled PPO: the weight of the behaviour policy, its caps, and the proximal policy between versions."""

import math

import pytest
import torch

import rlx_plugins as rlx
from rlx_plugins.core.registry import create
from rlx_plugins.testing import evaluate
from rlx_plugins.testing.evaluation.building import reward_batch

NAN, INF = math.nan, math.inf


def data(seed=0, rows=4, width=5):
    g = torch.Generator().manual_seed(seed)
    behav = -torch.rand(rows, width, generator=g, dtype=torch.float64) * 2 - 0.1
    prox = behav + 0.3 * torch.randn(rows, width, generator=g, dtype=torch.float64)
    return {
        "logp_new": prox + 0.2 * torch.randn(rows, width, generator=g, dtype=torch.float64),
        "logp_prox": prox,
        "logp_behav": behav,
        "advantages": torch.tensor([1.0, -1.0, 0.5, -2.0]).double(),
        "response_mask": (torch.arange(width) < torch.tensor([5, 3, 0, 4])[:, None]).double(),
    }


def run(d, **parameters):
    return evaluate("correction", "decoupled_ppo", d, parameters)


def interpolated(**changes):
    return data() | {"logp_prox": None, "versions": [[3] * 5, [6, 6, 5, -1, -1], [0] * 5, [7, 4, 7, 1, 2]]} | changes


def test_at_the_proximal_policy_the_gradient_is_the_weighted_policy_gradient():
    d = data()
    out = run(d | {"logp_new": d["logp_prox"]})
    w = (d["logp_prox"] - d["logp_behav"]).exp()
    want = -d["advantages"][:, None] * w * d["response_mask"] / d["response_mask"].sum()
    torch.testing.assert_close(out["grad_logp"], want)


def test_inside_the_range_weight_and_ratio_are_the_whole_ratio_whatever_the_proximal_policy():
    d = data()
    grads = []
    for shift in (-0.05, 0.0, 0.05):
        prox = d["logp_prox"] + shift
        out = run(d | {"logp_prox": prox, "logp_new": d["logp_prox"]}, clip_low=0.5, clip_high=0.5)
        grads.append(out["grad_logp"])
    for grad in grads[1:]:
        torch.testing.assert_close(grad, grads[0])
    assert grads[0].abs().sum() > 0


def test_equal_proximal_and_behaviour_policies_are_ppo():
    d = data()
    out = run(d | {"logp_behav": d["logp_prox"]})
    base = {"logp_new": d["logp_new"], "logp_old": d["logp_prox"]}
    ppo = evaluate(
        "clip", "baselines", base | {k: d[k] for k in ("advantages", "response_mask")}, {"host": "trl", "loss": "dapo"}
    )
    torch.testing.assert_close(out["loss"], ppo["loss"])
    torch.testing.assert_close(out["grad_logp"], ppo["grad_logp"])


@pytest.mark.parametrize(("mode", "above"), [("mask", 0.0), ("truncate", 1.1)])
@pytest.mark.parametrize("scored", [True, False])
def test_weights_above_the_cap(mode, above, scored):
    d = data() if scored else interpolated()
    more = {} if scored else {"current_version": 7}
    free, capped = run(d, **more)["behave_weight"], run(d, cap=1.1, cap_mode=mode, **more)["behave_weight"]
    over = free > 1.1
    assert over.any() and (capped[over] == above).all()
    torch.testing.assert_close(capped[~over], free[~over])


def test_capped_tokens_stay_in_the_denominator():
    d = data()
    out = run(d, cap=1e-6)
    assert out["loss"] == 0 and not out["grad_logp"].any()
    d["logp_behav"] = d["logp_prox"].clone()
    d["logp_behav"][0, 0] -= 9
    out = run(d | {"logp_new": d["logp_prox"]}, cap=5.0)
    assert out["grad_logp"][0, 0] == 0 and out["grad_logp"][0, 1] == pytest.approx(-1 / 12)


@pytest.mark.parametrize("unknown", [NAN, -INF])
@pytest.mark.parametrize("scored", [True, False])
def test_a_token_of_unknown_behaviour_has_weight_one(unknown, scored):
    d = data() if scored else interpolated()
    d["logp_behav"][0, 1] = unknown
    out = run(d, **({} if scored else {"current_version": 7}))
    assert out["behave_weight"][0, 1] == 1
    assert torch.isfinite(out["grad_logp"]).all() and torch.isfinite(out["loss"])


@pytest.mark.parametrize("scored", [True, False])
def test_without_a_cap_a_weight_beyond_twenty_nats_is_what_it_is(scored):
    d = data() if scored else interpolated(versions=[[5] * 5] * 4)
    more = {} if scored else {"current_version": 7}
    d["logp_behav"][0, 0] -= 55
    prox = d["logp_prox"] if scored else (d["logp_behav"] + d["logp_new"]) / 2
    want = (prox - d["logp_behav"])[0, 0].exp()
    assert want > math.exp(25)
    torch.testing.assert_close(run(d, **more)["behave_weight"][0, 0], want)


def test_the_largest_weight_is_finite_in_float32():
    behav = torch.tensor([[-200.0]])
    batch = reward_batch(response_mask=[[1]]).with_columns(logp_old=torch.tensor([[-1.0]]), logp_rollout=behav)
    weight = create("correction", "decoupled_ppo")(batch)["weight"]
    assert weight.dtype == torch.float32 and torch.isfinite(weight * math.exp(20)).all()


def test_a_dual_clip_bounds_the_loss_of_a_negative_advantage():
    d = {
        "logp_new": [[2.0]],
        "logp_prox": [[-2.0]],
        "logp_behav": [[-2.0]],
        "advantages": [-1.0],
        "response_mask": [[1]],
    }
    assert run(d)["loss"] == pytest.approx(math.exp(4))
    assert run(d, dual_clip=3.0)["loss"] == pytest.approx(3.0)


def test_the_interpolation_moves_with_the_versions_between_and_stays_between_the_two_policies():
    d = interpolated(versions=[[7, 6, 5, 3, -1]] * 4)
    out = run(d, current_version=7)
    share = (out["logp_prox"] - d["logp_behav"]) / (d["logp_new"] - d["logp_behav"])
    torch.testing.assert_close(share[0], torch.tensor([0.0, 0.0, 1 / 2, 3 / 4, 0.0]).double())
    torch.testing.assert_close(
        out["behave_weight"] * d["response_mask"], (out["logp_prox"] - d["logp_behav"]).exp() * d["response_mask"]
    )


def test_a_version_ahead_of_the_current_one_is_not_extrapolated():
    d = interpolated(versions=[[9] * 5] * 4)
    mask = d["response_mask"].bool()
    torch.testing.assert_close(run(d, current_version=7)["logp_prox"][mask], d["logp_behav"][mask])


def test_the_interpolated_loss_is_clipped_against_the_point_it_found_with_gradient_of_the_current_policy_only():
    d = interpolated()
    out = run(d, current_version=7)
    scored = run(d | {"logp_prox": out["logp_prox"]})
    for name in ("loss", "grad_logp", "behave_weight"):
        torch.testing.assert_close(out[name], scored[name])


def test_a_clipped_token_has_no_gradient_through_the_point_it_is_clipped_against():
    d = {"logp_new": [[-0.5]], "logp_prox": None, "logp_behav": [[-1.5]], "advantages": [1.0], "response_mask": [[1]]}
    out = run(d | {"versions": [[5]]}, current_version=7)
    assert out["loss"] == pytest.approx(-1.2 * math.exp(0.5)) and out["grad_logp"] == 0


def test_staleness_may_be_one_number_per_row():
    d = data()
    columns = {"logp_rollout": d["logp_behav"], "logp_old": d["logp_prox"]}
    clip = create("clip", "decoupled_ppo")

    def loss(staleness):
        batch = reward_batch(response_mask=d["response_mask"]).with_columns(staleness=staleness, **columns)
        return clip(rlx.PolicyTerms(d["logp_new"], batch, advantages=d["advantages"][:, None].expand(4, 5)))[0]

    rows = torch.tensor([4, 1, 0, 2])
    torch.testing.assert_close(loss(rows), loss(rows[:, None].expand(4, 5)))


@pytest.mark.parametrize("scored", [True, False])
def test_garbage_behind_the_mask_touches_nothing(scored):
    d = data() if scored else interpolated()
    mask, more = d["response_mask"].bool(), {} if scored else {"current_version": 7}
    names = ("logp_new", "logp_behav") + (("logp_prox",) if scored else ())
    clean, other = run(d, **more), run(d | {k: torch.where(mask, d[k], NAN) for k in names}, **more)
    for name in ("loss", "grad_logp", "behave_weight", "logp_prox"):
        torch.testing.assert_close(other[name], clean[name])


def test_another_weight_for_the_same_mismatch_is_refused():
    host = rlx.HostProfile("any", frozenset({"logp_old", "logp_rollout", "staleness"}))
    with pytest.raises(rlx.ConfigError, match="clip decoupled_ppo already divides by logp_rollout"):
        rlx.build({"method": {"name": "decoupled_ppo", "proximal": "interpolated"}, "correction": "tis"}, host)
    with pytest.raises(rlx.ConfigError, match="ratio token already divides by logp_rollout"):
        rlx.build({"method": "decoupled_ppo", "ratio": {"name": "token", "denominator": "logp_rollout"}}, host)
