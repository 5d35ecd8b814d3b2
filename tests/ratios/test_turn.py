"""The ratio of a turn: one value for its tokens, the gradient of the mean, whatever the turn ids."""

import math

import pytest
import torch

import rlx_plugins as rlx

TURNS = torch.tensor([[0, 0, -1, 1, 1, 1], [5, 5, 2, -1, 5, -1]])
MASK = torch.tensor([[1, 1, 0, 1, 1, 0], [1, 1, 1, 0, 1, 1]]).bool()


def log_probs(seed=0):
    g = torch.Generator().manual_seed(seed)
    old = -torch.rand(2, 6, generator=g, dtype=torch.float64)
    return old + 0.5 * torch.randn(2, 6, generator=g, dtype=torch.float64), old


def ratio(logp_new, logp_old, mask=MASK, turns=TURNS, **parameters):
    columns = {"response_mask": mask, "logp_old": logp_old, "turn_ids": turns, "group": torch.arange(len(mask))}
    return rlx.create("ratio", "turn", **parameters)(rlx.PolicyTerms(logp_new, rlx.RolloutBatch(columns)))


def test_all_tokens_of_a_turn_share_the_geometric_mean_of_their_ratios():
    new, old = log_probs()
    d, got = new - old, ratio(new, old)
    for row, tokens in ((0, [0, 1]), (0, [3, 4]), (1, [0, 1, 4]), (1, [2])):
        torch.testing.assert_close(got[row, tokens], d[row, tokens].mean().exp().expand(len(tokens)))
    assert got[0, 2] == got[0, 5] == got[1, 3] == got[1, 5] == 1, "masked, or a model token outside every turn"


def test_the_gradient_is_that_of_the_value():
    new, old = log_probs(1)
    assert torch.autograd.gradcheck(lambda x: ratio(x, old)[MASK], new.requires_grad_())
    (grad,) = torch.autograd.grad(ratio(new, old)[1, 5], new)
    assert not grad.any(), "a token without a turn carries no gradient"


def test_one_turn_per_row_is_the_sequence_ratio_and_one_token_per_turn_the_token_ratio():
    new, old = log_probs(2)
    terms = rlx.PolicyTerms(new, rlx.RolloutBatch({"response_mask": MASK, "logp_old": old, "group": torch.arange(2)}))
    one = ratio(new, old, turns=torch.full((2, 6), 3))
    torch.testing.assert_close(one, rlx.create("ratio", "sequence", gradient="sequence")(terms))
    each = ratio(new, old, turns=torch.arange(6).expand(2, -1).contiguous())
    torch.testing.assert_close(each, rlx.create("ratio", "token")(terms))


def test_permuting_the_tokens_of_a_turn_changes_nothing():
    new, old = log_probs(3)
    order = torch.tensor([1, 0, 2, 4, 3, 5])
    torch.testing.assert_close(ratio(new[:1][:, order], old[:1][:, order], MASK[:1], TURNS[:1]), ratio(new, old)[:1])


def test_garbage_under_the_mask_reaches_neither_value_nor_gradient():
    new, old = log_probs(4)
    nan = torch.where(MASK, 0.0, torch.nan)
    clean, dirty = (x.clone().requires_grad_() for x in (new, new + nan))
    want, got = ratio(clean, old), ratio(dirty, old + nan)
    assert torch.equal(want, got)
    for a, b in zip(torch.autograd.grad(want.sum(), clean), torch.autograd.grad(got.sum(), dirty), strict=True):
        assert torch.equal(a, b)


def test_a_mean_log_ratio_beyond_the_clamp_is_held_and_finite():
    new, old = log_probs(5)
    old[0, 0] = -torch.inf
    live = new.requires_grad_()
    got = ratio(live, old)
    assert float(got[0, 0].detach()) == pytest.approx(math.exp(20))
    (grad,) = torch.autograd.grad(got.sum(), live)
    assert torch.isfinite(grad).all() and not grad[0, :2].any()


def test_the_sum_of_a_long_turn_is_float32_for_bfloat16_log_probs():
    d = torch.tensor([[16.0] * 20 + [1.0]], dtype=torch.bfloat16)  # the sum, 321, does not exist in bfloat16
    one = torch.ones(1, 21)
    got = ratio(d, torch.zeros_like(d), one.bool(), one.long())
    assert got.dtype == torch.bfloat16 and float(got[0, 0]) == pytest.approx(math.exp(321 / 21), rel=2**-8)


def test_the_loss_never_waits_for_the_device():
    new, old = log_probs()
    assert ratio(new.to("meta"), old.to("meta"), MASK.to("meta"), TURNS.to("meta")).is_meta


def test_a_selector_that_cuts_rows_is_refused_beside_it():
    host = rlx.HostProfile("any", frozenset({"logp_old", "turn_ids"}), frozenset({"cut_rows"}))
    with pytest.raises(rlx.ConfigError, match="ratio turn needs full rows"):
        rlx.build({"ratio": "turn", "selector": "nat_rpc"}, host)
