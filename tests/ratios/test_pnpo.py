"""PNPO's prefix mean: between the token ratio and the sequence ratio, causal, with two gradient paths."""

import math

import pytest
import torch

import rlx_plugins as rlx
from rlx_plugins.testing.evaluation.building import run_loss


def terms_of(logp_new, logp_old, mask):
    batch = rlx.RolloutBatch({"response_mask": mask.bool(), "logp_old": logp_old, "group": torch.arange(len(mask))})
    return rlx.PolicyTerms(logp_new, batch)


def weight(logp_new, logp_old, mask, **parameters):
    return rlx.create("ratio", "pnpo", **parameters)(terms_of(logp_new, logp_old, mask))


def rows(seed=0, n=3, t=5):
    g = torch.Generator().manual_seed(seed)
    logp_old = -torch.rand(n, t, generator=g, dtype=torch.float64) - 0.2
    logp_new = logp_old + torch.randn(n, t, generator=g, dtype=torch.float64) * 0.4
    return logp_new, logp_old, torch.tensor([[1, 1, 1, 1, 1], [1, 0, 0, 1, 1], [0, 1, 1, 0, 0]])


def test_the_first_token_has_ppos_ratio_and_the_last_one_gspos():
    columns = rows()
    token = rlx.create("ratio", "token")(terms_of(*columns))
    sequence = rlx.create("ratio", "sequence")(terms_of(*columns))
    w = weight(*columns)
    for row, (first, last) in enumerate([(0, 4), (0, 4), (1, 2)]):
        torch.testing.assert_close(w[row, first], token[row, first])
        torch.testing.assert_close(w[row, last], sequence[row, last])


def test_tool_tokens_inside_a_row_count_neither_in_the_sum_nor_in_the_rank():
    logp_new, logp_old, _ = rows()
    gappy = weight(logp_new, logp_old, torch.tensor([[1, 0, 0, 1, 1]] * 3))
    at = [0, 3, 4]
    dense = weight(logp_new[:, at], logp_old[:, at], torch.ones(3, 3))
    torch.testing.assert_close(gappy[:, at], dense)
    assert (gappy[:, 1:3] == 1).all()


def test_a_weight_does_not_depend_on_later_tokens():
    logp_new, logp_old, mask = rows()
    later = logp_new.clone()
    later[:, 3:] -= 7
    before, after = weight(logp_new, logp_old, mask), weight(later, logp_old, mask)
    torch.testing.assert_close(before[:, :3], after[:, :3])
    assert (before[0, 3:] != after[0, 3:]).all()


@pytest.mark.parametrize("grad_mode", ["token", "prefix"])
def test_a_response_of_one_token_is_grpo(grad_mode):
    columns = [torch.tensor([[x]], dtype=torch.float64) for x in (-0.4, -0.9, 1.0)]
    live = columns[0].requires_grad_()
    w = weight(*columns, grad_mode=grad_mode)
    (grad,) = torch.autograd.grad(w.sum(), live)
    torch.testing.assert_close(w, torch.tensor([[0.5]], dtype=torch.float64).exp())
    torch.testing.assert_close(grad, w)


def test_on_policy_the_token_gradient_is_grpos():
    _, logp_old, mask = rows()
    out = run_loss(
        {"ratio": rlx.create("ratio", "pnpo")},
        logp_new=logp_old,
        logp_old=logp_old,
        advantages=[1.0, -2.0, 0.5],
        response_mask=mask,
    )
    want = -torch.tensor([[1.0], [-2.0], [0.5]]) * mask / mask.sum()
    torch.testing.assert_close(out["grad_logp"], want.double())
    torch.testing.assert_close(out["ratio"], mask.double())


def test_the_prefix_gradient_is_the_derivative_of_the_value():
    logp_new, logp_old, mask = rows(4)

    def clipped(live):
        w = weight(live, logp_old, mask, grad_mode="prefix")
        return rlx.clipped_surrogate(w, torch.tensor([[1.0], [-1.0], [0.7]]).double(), 0.8, 1.2)

    assert torch.autograd.gradcheck(clipped, logp_new.requires_grad_())


@pytest.mark.parametrize("grad_mode", ["token", "prefix"])
def test_garbage_under_the_mask_reaches_neither_value_nor_gradient(grad_mode):
    logp_new, logp_old, mask = rows()
    nan = torch.where(mask.bool(), 0.0, torch.nan)
    advantages = torch.tensor([[1.0], [-1.0], [0.7]]).double()
    part = {"ratio": rlx.create("ratio", "pnpo", grad_mode=grad_mode)}
    clean, dirty = (
        run_loss(
            part, logp_new=logp_new + x, logp_old=logp_old + x, advantages=advantages + x * mask + x, response_mask=mask
        )
        for x in (torch.zeros_like(nan), nan)
    )
    for name in ("loss", "per_token_loss", "grad_logp", "ratio"):
        torch.testing.assert_close(dirty[name], clean[name])


@pytest.mark.parametrize("grad_mode", ["token", "prefix"])
@pytest.mark.parametrize("infinite", ["logp_new", "logp_old"])
def test_an_infinite_log_ratio_counts_as_the_clamp(infinite, grad_mode):
    logp_new, logp_old, mask = rows()
    broken, sign = (logp_new, -1) if infinite == "logp_new" else (logp_old, 1)
    broken[0, 1] = -torch.inf
    logp_new.requires_grad_()
    w = weight(logp_new, logp_old, mask, grad_mode=grad_mode)
    first = (logp_new - logp_old)[0, 0]
    torch.testing.assert_close(w[0, 1], ((first + sign * 20) / 2).exp())
    (grad,) = torch.autograd.grad(w.sum(), logp_new)
    assert torch.isfinite(w).all() and torch.isfinite(grad).all()


def test_the_running_sum_is_float32_for_bfloat16_log_probs():
    d = torch.tensor([[16.0] * 20 + [1.0]], dtype=torch.bfloat16)  # the sum, 321, does not exist in bfloat16
    w = weight(d, torch.zeros_like(d), torch.ones(1, 21))
    assert w.dtype == torch.bfloat16
    assert float(w[0, -1]) == pytest.approx(math.exp(321 / 21), rel=2**-8)


def test_the_loss_never_waits_for_the_device():
    assert weight(*(c.to("meta") for c in rows())).is_meta


def test_the_method_puts_the_ratio_under_ppos_clip():
    host = rlx.HostProfile("any", signals=frozenset({"logp_old"}))
    parts = rlx.build({"method": {"name": "pnpo", "eps_high": 0.3, "grad_mode": "prefix"}}, host)
    assert (parts.one("ratio").name, parts.one("ratio").grad_mode) == ("pnpo", "prefix")
    assert (parts.one("clip").name, parts.one("clip").eps_low, parts.one("clip").eps_high) == ("ppo", 0.2, 0.3)
