"""PPO-EWMA: the averaged weights, the band, the active share, and the new start it asks the host for."""

import math

import pytest
import torch

import rlx_plugins as rlx
from rlx_plugins.corrections.ppo_ewma import ProximalAverage
from rlx_plugins.hosts.table import TableHost, TableTrainer
from rlx_plugins.testing import evaluate

NAN, INF = math.nan, math.inf


def data(seed=0, rows=4, width=5):
    g = torch.Generator().manual_seed(seed)
    prox = -torch.rand(rows, width, generator=g, dtype=torch.float64) * 2 - 0.1
    return {
        "logp_new": prox + 0.3 * torch.randn(rows, width, generator=g, dtype=torch.float64),
        "logp_prox": prox,
        "logp_rollout": prox + 0.5 * torch.randn(rows, width, generator=g, dtype=torch.float64),
        "advantages": torch.tensor([1.0, -1.0, 0.5, -2.0]).double(),
        "response_mask": (torch.arange(width) < torch.tensor([5, 3, 0, 4])[:, None]).double(),
    }


def run(d, **parameters):
    return evaluate("correction", "ppo_ewma", {"thetas": [], **d}, parameters)


def test_three_equal_policies_give_the_plain_gradient():
    d = data()
    out = run(d | {"logp_new": d["logp_prox"], "logp_rollout": d["logp_prox"]})
    want = -d["advantages"][:, None] * d["response_mask"] / d["response_mask"].sum()
    torch.testing.assert_close(out["grad_logp"], want)
    assert out["active_fraction"] == 1


@pytest.mark.parametrize("weight", ["mask", "weight"])
def test_tokens_outside_the_band_weigh_nothing_and_the_others_one_or_their_discrepancy(weight):
    d = data()
    out = run(d, d_low=0.8, d_high=1.25, weight=weight)
    r = (d["logp_prox"] - d["logp_rollout"]).exp()
    ok = (r >= 0.8) & (r <= 1.25) & d["response_mask"].bool()
    torch.testing.assert_close(out["weights"], torch.where(ok, 1.0 if weight == "mask" else r, 0.0).double())
    assert 0 < ok.sum() < d["response_mask"].sum()
    assert out["grad_logp"][~ok].abs().sum() == 0


def test_the_active_share_counts_tokens_inside_the_band_whose_clip_is_open():
    d = data()
    out = run(d, d_low=0.7, d_high=1.5)
    active = (out["grad_logp"] != 0) & d["response_mask"].bool()
    assert out["active_fraction"] == pytest.approx(float(active.sum() / d["response_mask"].sum()))
    assert 0 < out["active_fraction"] < 1


def test_widening_the_band_never_lowers_the_active_share():
    shares = [run(data(), d_low=1 / b, d_high=b)["active_fraction"] for b in (1.05, 1.2, 1.5, 4.0)]
    assert shares == sorted(shares) and shares[0] < shares[-1]


@pytest.mark.parametrize("unknown", [NAN, INF, -INF])
def test_a_token_of_unknown_discrepancy_is_not_inside(unknown):
    d = data()
    d["logp_rollout"][0, 0] = unknown
    out = run(d, d_low=0.0, d_high=INF)
    assert out["weights"][0, 0] == 0 and out["grad_logp"][0, 0] == 0
    assert torch.isfinite(out["loss"]) and out["weights"].sum() == 11


def test_garbage_behind_the_mask_touches_nothing():
    d = data()
    dirty = {k: torch.where(d["response_mask"].bool(), d[k], NAN) for k in ("logp_new", "logp_prox", "logp_rollout")}
    clean, other = run(d), run(d | dirty)
    for name in ("loss", "grad_logp", "weights", "active_fraction"):
        torch.testing.assert_close(other[name], clean[name])


# ---- the average -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [0, 1, 4, 20])
def test_the_average_is_the_explicit_weighted_sum(window):
    decay = ProximalAverage.decay_for(window)
    average = ProximalAverage(decay)
    thetas = torch.randn(30, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for t, theta in enumerate(thetas):
        average.update([theta])
        weight = decay ** torch.arange(t, -1, -1).double()
        torch.testing.assert_close(average.mean[0], (weight[:, None] * thetas[: t + 1]).sum(0) / weight.sum())
    if window == 0:
        assert torch.equal(average.mean[0], thetas[-1])


def test_the_mean_age_tends_to_half_the_window():
    decay, n = ProximalAverage.decay_for(10), 400
    ages = ProximalAverage(decay)
    for t in range(n):
        ages.update([torch.tensor([float(t)], dtype=torch.float64)])
    assert n - 1 - float(ages.mean[0]) == pytest.approx(5.0)


def test_constant_weights_are_their_own_average_and_after_a_reset_two_updates_mix_by_the_decay():
    theta = torch.tensor([1.0, -2.0], dtype=torch.float64)
    average = ProximalAverage(0.5)
    for _ in range(3):
        average.update([theta])
    torch.testing.assert_close(average.mean[0], theta)
    average.reset([3 * theta])
    assert torch.equal(average.mean[0], 3 * theta)
    average.update([0 * theta])
    torch.testing.assert_close(average.mean[0], 0.5 * 3 * theta / 1.5)


def test_a_settled_average_is_the_plain_moving_average():
    average = ProximalAverage(0.9, [torch.zeros(1).double()], settled=True)
    average.update([torch.ones(1).double()])
    average.update([torch.ones(1).double()])
    assert float(average.mean[0]) == pytest.approx(0.19)


def test_the_average_survives_a_restart_and_a_checkpoint_without_its_age_starts_anew():
    g = torch.Generator().manual_seed(0)
    one, other = ProximalAverage(0.8), ProximalAverage(0.8)
    for _ in range(3):
        one.update([torch.randn(2, generator=g)])
    other.load_state_dict(one.state_dict())
    theta = torch.randn(2, generator=g)
    for average in (one, other):
        average.update([theta])
    assert torch.equal(one.mean[0], other.mean[0])
    other.load_state_dict({"mean": [theta]})
    assert other.z == 1


def test_half_precision_weights_are_averaged_in_float32():
    average = ProximalAverage(0.999)
    for _ in range(2):
        average.update([torch.ones(1).bfloat16()])
    assert average.mean[0].dtype == torch.float32


# ---- the new start ---------------------------------------------------------------------------------------------------


def test_it_asks_for_a_new_start_below_the_share_and_not_on_an_empty_batch():
    part = rlx.create("correction", "ppo_ewma", min_active=0.9)
    for active, asks in ((0.89, True), (0.9, False), (None, False)):
        part.load_state_dict({"active": active})
        assert part.reset_proximal == asks
    d = data()
    columns = {k: d[k] for k in ("logp_prox", "logp_rollout")} | {"logp_old": d["logp_new"]}
    batch = rlx.RolloutBatch(
        columns | {"response_mask": torch.zeros(4, 5).bool(), "group": torch.arange(4), "advantages": torch.zeros(4, 5)}
    )
    part.load_state_dict({"active": 0.1})
    assert part(batch)["active_fraction"] == 0 and not part.reset_proximal


def trainer(**parameters):
    host = TableHost(8, prox_decay=ProximalAverage.decay_for(4))
    config = {"method": {"name": "ppo_ewma", **parameters}}
    return TableTrainer(config, host=host, groups=3, group_size=4, max_tokens=8, total_steps=6, learning_rate=0.3)


def test_the_host_starts_its_average_anew_when_asked():
    always, never = trainer(d_low=1.0, d_high=1.0), trainer(min_active=0.0)
    for run_ in (always, never):
        run_.run(3)
    assert torch.equal(always.host.prox, always.host.policy.theta.detach())
    assert not torch.equal(never.host.prox, never.host.policy.theta.detach())
    assert 0 < never.log[-1]["correction/ppo_ewma/active_fraction"] <= 1


def test_a_host_that_can_not_reset_is_refused_unless_no_reset_is_wanted():
    host = rlx.HostProfile("any", frozenset({"logp_old", "logp_rollout", "logp_prox"}))
    with pytest.raises(rlx.ConfigError, match="correction ppo_ewma needs a host with the capability 'reset_prox'"):
        rlx.build({"method": "ppo_ewma"}, host)
    parts = rlx.build({"method": {"name": "ppo_ewma", "min_active": 0.0}}, host)
    assert parts.one("ratio").denominator == "logp_prox" and parts.one("clip").eps_high == 0.28
