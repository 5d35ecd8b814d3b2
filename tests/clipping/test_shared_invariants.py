"""What holds for every clip that makes its own ratio: order of rows, garbage behind the mask, narrow types."""

import math

import pytest
import torch

import rlx_plugins as rlx
from rlx_plugins.testing.evaluation.building import run_loss

CLIPS = ["dppo", "tbpo", "ess", "decoupled_ppo"]
WIDE = {"tbpo": {"eps_low": 0.5, "eps_high": 0.5, "eps_neg_high": 0.5}}
ROWS, TOKENS = 4, 5
MASK = torch.arange(TOKENS) < torch.tensor([5, 3, 0, 4])[:, None]


def data(dtype=torch.float64):
    g = torch.Generator().manual_seed(0)
    old = -torch.rand(ROWS, TOKENS, generator=g, dtype=torch.float64) - 0.1
    noise = [torch.randn(ROWS, TOKENS, generator=g, dtype=torch.float64) for _ in range(3)]
    columns = {
        "logp_new": old + 0.3 * noise[0],
        "logp_old": old,
        "logp_rollout": old + 0.2 * noise[1],
        "advantages": noise[2],
    }
    return {k: v.to(dtype) for k, v in columns.items()}


def run(name, d, mask=MASK):
    agg = "seq_mean_token_mean" if name == "tbpo" else "token_mean"
    clip = rlx.create("clip", name, **WIDE.get(name, {}))
    stale = torch.full(mask.shape, 2)
    return run_loss({"clip": clip}, response_mask=mask.double(), agg=agg, staleness=stale, **d)


@pytest.mark.parametrize("name", CLIPS)
def test_token_advantages_and_log_probs_behind_the_mask_may_be_anything(name):
    dirty = {k: torch.where(MASK, v, math.nan) for k, v in data().items()}
    clean, other = run(name, data()), run(name, dirty)
    for result in ("loss", "grad_logp", "per_token_loss"):
        torch.testing.assert_close(other[result], clean[result])
    assert clean["grad_logp"].abs().sum() > 0


@pytest.mark.parametrize("name", CLIPS)
def test_the_order_of_rows_and_padding_do_not_matter(name):
    order = torch.tensor([2, 0, 3, 1])
    padded = {k: torch.nn.functional.pad(v[order], (0, 2), value=math.inf) for k, v in data().items()}
    whole, moved = run(name, data()), run(name, padded, torch.nn.functional.pad(MASK[order], (0, 2)))
    torch.testing.assert_close(moved["loss"], whole["loss"])
    torch.testing.assert_close(moved["grad_logp"][:, :TOKENS], whole["grad_logp"][order])
    assert not moved["grad_logp"][:, TOKENS:].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CLIPS)
def test_narrow_types_give_about_the_same_loss_and_a_finite_gradient(name, dtype):
    clip = rlx.create("clip", name, **WIDE.get(name, {}))

    def loss_of(d):
        batch = rlx.RolloutBatch(
            {
                "response_mask": MASK,
                "group": torch.arange(ROWS),
                "logp_old": d["logp_old"],
                "logp_rollout": d["logp_rollout"],
                "staleness": torch.full(MASK.shape, 2),
            }
        )
        live = d["logp_new"].clone().requires_grad_()
        terms = rlx.PolicyTerms(live, batch, advantages=torch.where(MASK, d["advantages"], 0))
        terms.ratio = rlx.create("ratio", "token")(terms)
        loss = torch.where(MASK, clip(terms)[0], 0).double().sum()
        return loss.detach(), torch.autograd.grad(loss, live)[0]

    (want, _), (got, grad) = loss_of(data()), loss_of(data(dtype))
    tolerance = 1e-5 if dtype == torch.float32 else 0.08
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)
    assert torch.isfinite(grad).all() and grad.dtype == dtype
