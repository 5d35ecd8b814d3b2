"""PDM: the predicted direction against finite differences, its estimators, and where it is DPPO."""

import math

import pytest
import torch

import rlx_plugins as rlx
from rlx_plugins.hosts.table import TableHost, TableTrainer
from rlx_plugins.testing import evaluate

NAN = math.nan


def data(seed=0, rows=4, width=5, size=6, spread=1.0):
    g = torch.Generator().manual_seed(seed)
    old = torch.randn(rows, width, size, generator=g, dtype=torch.float64)
    return {
        "logits_new": old + spread * torch.randn(rows, width, size, generator=g, dtype=torch.float64),
        "logits_old": old,
        "token_ids": torch.randint(0, size, (rows, width), generator=g),
        "advantages": torch.tensor([1.0, -1.0, 2.0, -0.5]).double(),
        "response_mask": (torch.arange(width) < torch.tensor([5, 3, 0, 4])[:, None]).double(),
    }


def run(d, **parameters):
    return evaluate("clip", "pdm", d, parameters)


def divergence_of(logits, mu, kind):
    pi = logits.softmax(-1)
    return (mu * (mu / pi).log()).sum(-1) if kind == "kl" else (pi - mu).abs().sum(-1) / 2


@pytest.mark.parametrize("kind", ["tv", "kl"])
def test_the_prediction_is_the_slope_of_the_divergence_along_the_step(kind):
    d = data()
    out = run(d, divergence=kind)
    mask, z, mu = d["response_mask"].bool(), d["logits_new"], d["logits_old"].softmax(-1)
    step = torch.nn.functional.one_hot(d["token_ids"], 6) - z.softmax(-1)
    h = 1e-6
    slope = (divergence_of(z + h * step, mu, kind) - divergence_of(z - h * step, mu, kind)) / (2 * h)
    torch.testing.assert_close(out["predicted"][mask], slope[mask], rtol=1e-5, atol=1e-8)
    torch.testing.assert_close(out["divergence"][mask], divergence_of(z, mu, kind)[mask])


@pytest.mark.parametrize("kind", ["tv", "kl"])
def test_dropped_is_what_is_far_and_predicted_to_go_further(kind):
    d, delta = data(), 0.1
    out = run(d, divergence=kind, delta_low=delta, delta_high=2 * delta)
    limit = torch.where(d["advantages"] > 0, 2 * delta, delta)[:, None]
    dropped = (out["divergence"] > limit) & (d["advantages"][:, None] * out["predicted"] > 0)
    mask = d["response_mask"].bool()
    assert torch.equal(out["keep"].bool(), mask & ~dropped) and 0 < out["keep"].sum() < mask.sum()
    want = -d["advantages"][:, None] * out["ratio"] * out["keep"] / mask.sum()
    torch.testing.assert_close(out["grad_logp"], want)


@pytest.mark.parametrize("estimator", ["full", "aggregate", "uniform"])
@pytest.mark.parametrize("kind", ["tv", "kl"])
def test_at_the_behaviour_policy_everything_is_kept_with_the_plain_gradient(estimator, kind):
    d = data(spread=0.0)
    out = run(d, estimator=estimator, divergence=kind, topk=3, delta_low=0.0, delta_high=0.0)
    want = -d["advantages"][:, None] * d["response_mask"] / d["response_mask"].sum()
    torch.testing.assert_close(out["grad_logp"], want)
    assert not out["divergence"].any()


@pytest.mark.parametrize("estimator", ["aggregate", "uniform"])
@pytest.mark.parametrize("kind", ["tv", "kl"])
def test_with_the_whole_vocabulary_every_estimator_is_exact(estimator, kind):
    d = data()
    full, top = run(d, divergence=kind), run(d, divergence=kind, estimator=estimator, topk=9)
    for name in ("divergence", "predicted", "keep"):
        torch.testing.assert_close(top[name], full[name])


@pytest.mark.parametrize("kind", ["tv", "kl"])
@pytest.mark.parametrize("topk", [1, 2, 4])
def test_a_coarser_divergence_is_never_larger(kind, topk):
    d = data()
    coarse, full = (run(d, divergence=kind, estimator=e, topk=topk)["divergence"] for e in ("aggregate", "full"))
    assert (coarse <= full + 1e-12).all() and (coarse < full - 1e-6).any()


@pytest.mark.parametrize("kind", ["tv", "kl"])
def test_one_token_outside_is_the_same_aggregated_or_spread_evenly(kind):
    d = data()
    d["token_ids"] = d["logits_old"].argmin(-1)  # appended to the top 4: one token of six is left
    aggregate, uniform, full = (
        run(d, divergence=kind, estimator=e, topk=4)["predicted"] for e in ("aggregate", "uniform", "full")
    )
    torch.testing.assert_close(aggregate, full)
    torch.testing.assert_close(uniform, full)


@pytest.mark.parametrize("kind", ["tv", "kl"])
def test_with_two_outcomes_it_is_dppo(kind):
    d = data(size=2)
    out = run(d, divergence=kind, delta_low=0.05, delta_high=0.05)
    new, old = (
        x.log_softmax(-1).gather(-1, d["token_ids"][..., None])[..., 0] for x in (d["logits_new"], d["logits_old"])
    )
    base = {"logp_new": new, "logp_old": old, "advantages": d["advantages"], "response_mask": d["response_mask"]}
    dppo = evaluate("clip", "dppo", base, {"variant": kind, "delta_low": 0.05, "delta_high": 0.05})
    assert torch.equal(out["keep"], dppo["keep"]) and (out["keep"] != d["response_mask"]).any()
    torch.testing.assert_close(out["grad_logp"], dppo["grad_logp"])
    torch.testing.assert_close(out["divergence"], dppo["divergence"], rtol=1e-6, atol=1e-7)


def test_the_ratios_direction_is_dppos_and_differs_from_the_prediction():
    d = data(3)
    predicted = run(d, delta_low=0.0, delta_high=0.0)["keep"]
    ratio = run(d, delta_low=0.0, delta_high=0.0, direction="ratio")
    outwards = d["advantages"][:, None] * (ratio["ratio"] - 1) > 0
    assert torch.equal(ratio["keep"].bool(), d["response_mask"].bool() & ~outwards)
    assert (predicted != ratio["keep"]).any()


def test_turning_the_advantage_round_turns_the_direction_not_the_divergence():
    d = data()
    one, other = (
        run(d | {"advantages": a}, delta_low=0.0, delta_high=0.0) for a in (d["advantages"], -d["advantages"])
    )
    torch.testing.assert_close(one["divergence"], other["divergence"])
    mask = d["response_mask"].bool()
    assert torch.equal(one["keep"][mask], 1 - other["keep"][mask])


def test_advantage_zero_is_kept():
    d = data()
    assert torch.equal(
        run(d | {"advantages": torch.zeros(4)}, delta_low=0.0, delta_high=0.0)["keep"] > 0, d["response_mask"] > 0
    )


def test_garbage_behind_the_mask_touches_nothing():
    d = data()
    mask = d["response_mask"].bool()
    dirty = {k: torch.where(mask[..., None], d[k], NAN) for k in ("logits_new", "logits_old")}
    dirty["token_ids"] = torch.where(mask, d["token_ids"], -100)
    clean, other = run(d), run(d | dirty)
    for name in ("loss", "grad_logp", "divergence", "predicted", "keep"):
        torch.testing.assert_close(other[name], clean[name])


def columns(d, topk=3):
    old = d["logits_old"].log_softmax(-1)
    top = old.topk(topk)
    return {
        "response_ids": d["token_ids"],
        "logp_rollout": old.gather(-1, d["token_ids"][..., None])[..., 0],
        "rollout_top_ids": top.indices,
        "rollout_top_logp": top.values,
    }


@pytest.mark.parametrize("estimator", ["aggregate", "uniform"])
@pytest.mark.parametrize("kind", ["tv", "kl"])
def test_without_any_engine_entries_it_is_dppo(kind, estimator):
    d = data()
    given = columns(d)
    given["rollout_top_logp"] = torch.full_like(given["rollout_top_logp"], NAN)
    clip = rlx.create("clip", "pdm", divergence=kind, estimator=estimator, delta_low=0.05, delta_high=0.05)
    made = clip.from_logits(d["logits_new"], given)
    logp = d["logits_new"].log_softmax(-1).gather(-1, d["token_ids"][..., None])[..., 0]
    ratio = (logp - given["logp_rollout"]).exp()
    keep = clip.kept(d["advantages"][:, None].expand(4, 5), made["pdm_divergence"], made["pdm_direction"], ratio)
    base = {"logp_new": logp, "logp_old": given["logp_rollout"], "advantages": d["advantages"]}
    dppo = evaluate(
        "clip",
        "dppo",
        base | {"response_mask": torch.ones(4, 5)},
        {"variant": kind, "delta_low": 0.05, "delta_high": 0.05},
    )
    assert torch.equal(keep, dppo["keep"].bool()) and 0 < keep.sum() < 20


@pytest.mark.parametrize("kind", ["tv", "kl"])
def test_a_token_without_engine_entries_is_judged_by_two_outcomes_and_its_ratio(kind):
    d = data()
    given = columns(d)
    given["rollout_top_logp"][0, 1] = NAN
    given["rollout_top_ids"][0, 1] = -1
    made = rlx.create("clip", "pdm", divergence=kind).from_logits(d["logits_new"], given)
    p = d["logits_new"].softmax(-1)[0, 1, d["token_ids"][0, 1]]
    q = given["logp_rollout"][0, 1].exp()
    two = (p - q).abs() if kind == "tv" else q * (q / p).log() + (1 - q) * ((1 - q) / (1 - p)).log()
    assert made["pdm_divergence"][0, 1] == pytest.approx(float(two), abs=1e-6)
    assert made["pdm_direction"][0, 1].sign() == (p - q).sign()


def test_fewer_entries_than_k_count_as_a_smaller_k():
    d = data()
    three, two = columns(d, 3), columns(d, 2)
    three["rollout_top_logp"][..., 2] = NAN
    clip = rlx.create("clip", "pdm", divergence="kl", estimator="uniform")
    for name, value in clip.from_logits(d["logits_new"], two).items():
        torch.testing.assert_close(clip.from_logits(d["logits_new"], three)[name], value)


def test_tokens_may_come_packed_and_in_half_precision():
    d = data()
    given, clip = columns(d), rlx.create("clip", "pdm", divergence="kl")
    whole = clip.from_logits(d["logits_new"], given)
    mask = d["response_mask"].bool()
    packed = clip.from_logits(d["logits_new"][mask], {k: v[mask] for k, v in given.items()})
    half = clip.from_logits(d["logits_new"].bfloat16(), given)
    for name, value in whole.items():
        torch.testing.assert_close(packed[name], value[mask])
        torch.testing.assert_close(half[name].double(), value, atol=0.03, rtol=0.03)


def test_nothing_made_of_the_logits_carries_gradient():
    d = data()
    live = d["logits_new"].clone().requires_grad_()
    assert not any(x.requires_grad for x in rlx.create("clip", "pdm").from_logits(live, columns(d)).values())


def test_a_host_without_the_engines_top_tokens_is_refused():
    host = rlx.HostProfile("any", frozenset({"logp_old", "logp_rollout"}), frozenset({"logits"}))
    with pytest.raises(rlx.ConfigError, match="clip pdm needs the signal 'rollout_top_ids'"):
        rlx.build({"clip": "pdm"}, host)


def test_it_drops_tokens_of_a_real_run():
    clip = {"name": "pdm", "delta_low": 0.0, "delta_high": 0.0}
    trainer = TableTrainer(
        {"clip": clip}, host=TableHost(8), groups=3, group_size=4, max_tokens=8, epochs=2, sync_every=2
    )
    log = trainer.run(4)
    assert any(0 < entry["clip/dropped"] < 1 for entry in log)
    assert any(entry["clip/against_ratio"] > 0 for entry in log) and all(math.isfinite(e["loss"]) for e in log)
