"""DPPO's mask: against verl's own losses, at its edges, and where PPO would clip."""

import math

import pytest
import torch

import rlx_plugins as rlx
from rlx_plugins.testing import evaluate
from rlx_plugins.testing.evaluation.building import run_loss

NAN, INF = math.nan, math.inf


def data(seed=0, rows=5, width=7):
    g = torch.Generator().manual_seed(seed)
    old = -torch.rand(rows, width, generator=g, dtype=torch.float64) * 2 - 0.05
    new = (old + 0.6 * torch.randn(rows, width, generator=g, dtype=torch.float64)).clamp(max=-1e-3)
    advantages = torch.randn(rows, 1, generator=g, dtype=torch.float64).expand(rows, width).contiguous()
    mask = torch.arange(width) < torch.tensor([7, 5, 0, 2, 6])[:, None]
    return {"logp_new": new, "logp_old": old, "advantages": advantages, "response_mask": mask}


def run(d, **parameters):
    return run_loss({"clip": rlx.create("clip", "dppo", **parameters)}, **d)


def one(p, q, advantage, **parameters):
    """One token of probability q then p."""
    d = {"logp_new": [[math.log(p)]], "logp_old": [[math.log(q)]], "advantages": [advantage], "response_mask": [[1]]}
    return evaluate("clip", "dppo", d, parameters)


@pytest.mark.parametrize("variant", ["tv", "kl"])
@pytest.mark.parametrize("cap", [1.1, 20.0])
def test_it_is_the_loss_of_verl(variant, cap):
    core = pytest.importorskip("verl.trainer.ppo.core_algos")
    from verl.workers.config import ActorConfig

    d = data()
    config = ActorConfig(
        strategy="fsdp",
        rollout_n=1,
        ppo_micro_batch_size_per_gpu=1,
        clip_ratio_low=0.05,
        clip_ratio_high=0.1,
        clip_ratio_c=cap,
    )
    weights = torch.rand(5, 7, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    live = d["logp_new"].clone().requires_grad_()
    theirs, _ = core.get_policy_loss_fn(f"dppo_{variant}")(
        d["logp_old"], live, d["advantages"], d["response_mask"], "token-mean", config, weights
    )
    (grad,) = torch.autograd.grad(theirs, live)
    mine = run(d | {"correction": weights}, variant=variant, delta_low=0.05, delta_high=0.1, ratio_cap=cap)
    assert 0 < mine["dropped"] < 1 and (cap > 2) == (mine["capped"] == 0)
    torch.testing.assert_close(mine["loss"], theirs.detach(), rtol=1e-8, atol=1e-12)
    torch.testing.assert_close(mine["grad_logp"], torch.where(d["response_mask"], grad, 0.0), rtol=3e-8, atol=1e-12)


@pytest.mark.parametrize("variant", ["tv", "kl"])
def test_on_policy_it_is_the_plain_policy_gradient(variant):
    d = data()
    out = run(d | {"logp_new": d["logp_old"]}, variant=variant, delta_low=0.0, delta_high=0.0)
    want = torch.where(d["response_mask"], -d["advantages"] / d["response_mask"].sum(), 0.0)
    torch.testing.assert_close(out["grad_logp"], want)
    assert out["dropped"] == 0 and out["divergence"] == pytest.approx(0)


@pytest.mark.parametrize("variant", ["tv", "kl"])
def test_a_token_that_moved_against_its_advantage_is_kept_however_far(variant):
    out = evaluate("clip", "dppo", data(), {"variant": variant, "delta_low": 0.0, "delta_high": 0.0})
    d = data()
    rises = d["logp_new"] > d["logp_old"]
    against = torch.where(d["advantages"] > 0, ~rises, rises) & d["response_mask"]
    assert against.any() and out["keep"][against].all()
    assert not out["keep"][~against].any()


def test_a_rare_token_may_grow_fivefold_where_ppo_clips():
    assert one(5e-4, 1e-4, 1.0, delta_high=0.15)["keep"] == 1
    ppo = run_loss(
        {"clip": rlx.create("clip", "ppo")},
        logp_new=[[math.log(5e-4)]],
        logp_old=[[math.log(1e-4)]],
        advantages=[1.0],
        response_mask=[[1]],
    )
    assert ppo["grad_logp"] == 0


@pytest.mark.parametrize(
    ("p", "advantage", "keep"), [(0.625, 1.0, 1), (0.626, 1.0, 0), (0.375, -1.0, 1), (0.374, -1.0, 0)]
)
def test_a_divergence_on_the_threshold_is_within_it(p, advantage, keep):
    assert one(p, 0.5, advantage, delta_low=0.125, delta_high=0.125)["keep"] == keep


def test_each_side_has_its_threshold():
    sides = {"delta_low": 0.05, "delta_high": 0.3}
    assert one(0.7, 0.5, 1.0, **sides)["keep"] == 1 and one(0.4, 0.5, -1.0, **sides)["keep"] == 0


def test_the_weight_is_capped_and_carries_no_gradient():
    out = one(0.4, 0.1, 1.0, delta_high=1.0, ratio_cap=3.0)
    assert out["grad_logp"][0, 0] == pytest.approx(-3.0)
    assert out["loss"] == pytest.approx(-3.0 * math.log(0.4))


@pytest.mark.parametrize("variant", ["tv", "kl"])
def test_impossible_tokens_leave_finite_numbers(variant):
    d = {
        "logp_new": [[-INF, -1.0, 0.0, -1.0]],
        "logp_old": [[-1.0, -INF, -1.0, 0.0]],
        "advantages": [1.0],
        "response_mask": [[1, 1, 1, 1]],
    }
    out = evaluate("clip", "dppo", d, {"variant": variant, "delta_high": 0.1, "delta_low": 0.1})
    assert out["keep"].tolist() == [[1, 0, 0, 1]]
    assert torch.isfinite(out["loss"]) and torch.isfinite(out["grad_logp"]).all()


def test_a_token_the_reference_could_not_sample_is_dropped_within_any_threshold():
    d = {"logp_new": [[-1.0]], "logp_old": [[-INF]], "advantages": [1.0], "response_mask": [[1]]}
    assert evaluate("clip", "dppo", d, {"delta_high": 1.0})["keep"] == 0


def test_garbage_behind_the_mask_touches_neither_loss_nor_gradient():
    d = data()
    dirty = {k: torch.where(d["response_mask"], v, NAN) for k, v in d.items() if k != "response_mask"}
    for variant in ("tv", "kl"):
        clean, other = run(d, variant=variant), run(d | dirty, variant=variant)
        torch.testing.assert_close(other["grad_logp"], clean["grad_logp"])
        torch.testing.assert_close(other["loss"], clean["loss"])
        assert torch.isfinite(other["divergence"])


def test_without_model_tokens_the_loss_is_zero():
    d = data()
    out = run(d | {"response_mask": torch.zeros(5, 7)})
    assert out["loss"] == 0 and not out["grad_logp"].any()


def test_tokens_of_advantage_zero_do_not_count_as_dropped():
    out = run(
        {
            "logp_new": [[-0.1], [-0.1]],
            "logp_old": [[-2.0], [-2.0]],
            "advantages": [0.0, 1.0],
            "response_mask": [[1], [1]],
        }
    )
    assert out["dropped"] == 1


def test_the_engines_policy_may_be_the_anchor_and_then_a_correction_is_refused():
    d = data()
    rollout = {"logp_rollout": d["logp_old"], "logp_old": d["logp_new"]}
    torch.testing.assert_close(run(d | rollout, denominator="logp_rollout")["loss"], run(d)["loss"])
    host = rlx.HostProfile("any", frozenset({"logp_old", "logp_rollout"}))
    with pytest.raises(rlx.ConfigError, match="clip dppo already divides by logp_rollout"):
        rlx.build({"clip": {"name": "dppo", "denominator": "logp_rollout"}, "correction": "tis"}, host)


def test_bfloat16_inputs_are_judged_in_float32():
    clip = rlx.create("clip", "dppo", variant="kl", delta_high=0.05)
    columns = {"response_mask": torch.ones(1, 1).bool(), "group": torch.zeros(1).long()}
    batch = rlx.RolloutBatch({**columns, "logp_old": torch.full((1, 1), math.log(0.998)).bfloat16()})
    new = torch.full((1, 1), math.log(0.9995)).bfloat16()
    moved = clip.moved(rlx.PolicyTerms(new, batch, advantages=torch.ones(1, 1).bfloat16()))
    assert moved.divergence.dtype == torch.float32 and torch.isfinite(moved.divergence).all() and moved.keep.all()
