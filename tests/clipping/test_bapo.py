"""BAPO's search for clip bounds: against the stepwise loop, over ranks, and at its edges."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import rlx_plugins as rlx
from rlx_plugins.testing.evaluation.building import run_loss

SEEDS = st.integers(0, 10**6)


def micro_batch(seed, rows=4, tokens=5, dtype=torch.float64):
    g = torch.Generator().manual_seed(seed)
    logp_old = -torch.rand(rows, tokens, generator=g, dtype=torch.float64) * 2
    logp_new = logp_old + torch.randn(rows, tokens, generator=g, dtype=torch.float64) * 0.5
    advantages = torch.randn(rows, 1, generator=g, dtype=torch.float64).expand(rows, tokens)
    mask = torch.rand(rows, tokens, generator=g) < 0.8
    return logp_new.to(dtype), logp_old.to(dtype), advantages.to(dtype), mask


def terms_of(logp_new, logp_old, advantages, mask, all_reduce=None):
    batch = rlx.RolloutBatch({"response_mask": mask, "logp_old": logp_old, "group": torch.arange(len(mask))})
    terms = rlx.PolicyTerms(
        logp_new, batch, advantages=advantages, **({"all_reduce": all_reduce} if all_reduce else {})
    )
    terms.ratio = rlx.create("ratio", "token")(terms)
    return terms


def stepwise(part, ratio, advantages):
    """The search as the paper's loop, over flat lists of tokens."""

    def balance(low, high):
        p = sum(min(r, high) * a for r, a in zip(ratio, advantages, strict=True) if a >= 0)
        n = sum(max(r, low) * -a for r, a in zip(ratio, advantages, strict=True) if a < 0)
        return math.inf if n <= 0 else p / (n + part.eps)

    low, high, steps = part.low_start, part.high_start, 0
    for side in ("low", "high") if part.order == "low_first" else ("high", "low"):
        while balance(low, high) < part.target:
            if side == "low" and low < part.low_max and part.low_step > 0:
                low = min(low + part.low_step, part.low_max)
            elif side == "high" and high < part.high_max and part.high_step > 0:
                high = min(high + part.high_step, part.high_max)
            else:
                break
            steps += 1
    return low, high, balance(low, high), steps


@settings(max_examples=60, deadline=None)
@given(
    SEEDS,
    st.sampled_from([0.9, 1.01, 1.04, 1.1, 2.0]),
    st.sampled_from(["low_first", "high_first"]),
    st.sampled_from([0.0, 0.05]),
    st.sampled_from([0.0, 0.07]),
)
def test_the_search_is_the_papers_loop(seed, factor, order, low_step, high_step):
    terms = terms_of(*micro_batch(seed))
    start = float(rlx.create("clip", "bapo", target=0.0).search(terms).balance)
    target = factor * start if math.isfinite(start) else 1.0
    part = rlx.create("clip", "bapo", target=target, order=order, low_step=low_step, high_step=high_step)
    found = part.search(terms)
    want = stepwise(part, terms.ratio[terms.mask].tolist(), terms.advantages[terms.mask].tolist())
    assert [float(x) for x in found] == pytest.approx(want, rel=1e-12)
    assert part.low_start <= found.low <= part.low_max and part.high_start <= found.high <= part.high_max


@settings(max_examples=20, deadline=None)
@given(SEEDS)
def test_two_ranks_find_the_bounds_of_the_whole_batch(seed):
    part = rlx.create("clip", "bapo")
    columns = micro_batch(seed)
    whole = part.search(terms_of(*columns))
    sent = []

    def record(x):
        sent.append(x)
        return x

    for rows in (slice(0, 1), slice(1, 4)):
        part.search(terms_of(*(c[rows] for c in columns), all_reduce=record))
    assert len(sent) == 2 and sent[0].shape == sent[1].shape, "one all-reduce per call, of a fixed size"
    for rows in (slice(0, 1), slice(1, 4)):
        found = part.search(terms_of(*(c[rows] for c in columns), all_reduce=lambda x: sent[0] + sent[1]))
        torch.testing.assert_close(torch.stack(found[:3]), torch.stack(whole[:3]))


def test_target_zero_is_ppo_with_the_start_bounds():
    logp_new, logp_old, advantages, mask = micro_batch(3)
    given = {"logp_new": logp_new, "logp_old": logp_old, "advantages": advantages, "response_mask": mask}
    ours = run_loss({"clip": rlx.create("clip", "bapo", target=0.0)}, **given)
    ppo = run_loss({"clip": rlx.create("clip", "ppo", eps_low=0.4, eps_high=0.2, dual_clip=3.0)}, **given)
    for name in ("loss", "per_token_loss", "grad_logp"):
        torch.testing.assert_close(ours[name], ppo[name])
    assert ours["steps"] == 0


@pytest.mark.parametrize("sign", [1.0, 0.0])
def test_without_negative_advantages_the_bounds_stay(sign):
    logp_new, logp_old, advantages, mask = micro_batch(1)
    out = run_loss(
        {"clip": rlx.create("clip", "bapo")},
        logp_new=logp_new,
        logp_old=logp_old,
        advantages=advantages.abs() * sign,
        response_mask=mask,
    )
    assert (out["clip_low"], out["clip_high"]) == (0.6, 1.2) and out["pos_neg_ratio"] == math.inf
    assert (out["loss"] == 0) == (sign == 0)


def test_an_unreachable_target_ends_at_both_maxima():
    terms = terms_of(*micro_batch(0))
    terms.advantages = -terms.advantages.abs()
    found = rlx.create("clip", "bapo").search(terms)
    assert [float(x) for x in found] == pytest.approx([0.8, 2.0, 0.0, 20])


def test_a_fully_masked_micro_batch_has_loss_zero():
    logp_new, logp_old, advantages, mask = micro_batch(0)
    out = run_loss(
        {"clip": rlx.create("clip", "bapo")},
        logp_new=logp_new,
        logp_old=logp_old,
        advantages=advantages,
        response_mask=torch.zeros_like(mask),
    )
    assert out["loss"] == 0 and out["steps"] == 0 and not out["grad_logp"].any()


def test_garbage_under_the_mask_changes_nothing():
    logp_new, logp_old, advantages, mask = micro_batch(5)
    part = {"clip": rlx.create("clip", "bapo")}
    clean = run_loss(part, logp_new=logp_new, logp_old=logp_old, advantages=advantages, response_mask=mask)
    nan = torch.where(mask, 0.0, torch.nan)
    dirty = run_loss(
        part, logp_new=logp_new + nan, logp_old=logp_old + nan, advantages=advantages + nan, response_mask=mask
    )
    for name in ("loss", "grad_logp", "clip_low", "clip_high", "clipped"):
        torch.testing.assert_close(dirty[name], clean[name])
    assert not any(clean[name].requires_grad for name in ("clip_low", "pos_neg_ratio", "steps", "clipped"))


def test_the_gradient_stops_at_the_bounds_and_at_the_dual_clip():
    ratios = torch.tensor([[0.5, 1.0, 2.5], [0.5, 1.0, 3.5]], dtype=torch.float64)
    out = run_loss(
        {"clip": rlx.create("clip", "bapo", target=0.0)},
        logp_new=ratios.log(),
        logp_old=torch.zeros_like(ratios),
        advantages=[1, -1],
        response_mask=torch.ones(2, 3),
    )
    want = torch.tensor([[-0.5, -1.0, 0.0], [0.0, 1.0, 0.0]], dtype=torch.float64) / 6
    torch.testing.assert_close(out["grad_logp"], want)


def test_gradient_accounting_rebalances_by_dropping_negative_tokens():
    ratios = torch.tensor([[1.1], [0.62], [1.0]], dtype=torch.float64)
    advantages = torch.tensor([[1.0], [-1.0], [-1.0]], dtype=torch.float64)
    terms = terms_of(ratios.log(), torch.zeros_like(ratios), advantages, torch.ones(3, 1).bool())
    found = rlx.create("clip", "bapo", accounting="gradient").search(terms)
    assert [float(x) for x in found] == pytest.approx([0.65, 1.2, 1.1, 1]), "the token at 0.62 has left"
    assert float(rlx.create("clip", "bapo").search(terms).low) == pytest.approx(0.8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_low_precision_log_probs_keep_their_dtype_and_find_nearly_the_same_bounds(dtype):
    part = rlx.create("clip", "bapo", target=0.9)
    low = terms_of(*micro_batch(11, dtype=dtype))
    loss, _ = part(low)
    assert loss.dtype == dtype and torch.isfinite(loss).all()
    exact = part.search(terms_of(*(c.double() if c.is_floating_point() else c for c in micro_batch(11, dtype=dtype))))
    found = part.search(low)
    assert found.high.dtype == torch.float32
    assert abs(float(found.high) - float(exact.high)) <= 0.0501


def test_the_loss_never_waits_for_the_device():
    terms = terms_of(*(c.to("meta") for c in micro_batch(0)))
    loss, metrics = rlx.create("clip", "bapo")(terms)
    assert loss.is_meta and all(m.is_meta for m in metrics.values()), "meta tensors refuse to be read"


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"low_start": 0.9}, "bapo.low_start: must be <= low_max"),
        ({"high_max": 1.1}, "bapo.high_start: must be <= high_max"),
        ({"high_step": 1e-6}, "bapo.high_step: 1e-06 makes more than 1000 steps"),
        ({"low_max": 1.3}, "bapo.low_max: must be <= high_start"),
    ],
)
def test_bounds_that_do_not_fit_are_refused(parameters, message):
    with pytest.raises(rlx.ConfigError, match=message):
        rlx.create("clip", "bapo", **parameters)
