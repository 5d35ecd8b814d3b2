"""Importance ratios: value, who carries the gradient, bounds, and what hides under the mask."""

import math

import pytest
import torch

from rlx_plugins.core.batch import RolloutBatch
from rlx_plugins.core.registry import create
from rlx_plugins.core.terms import PolicyTerms

NAN, INF = math.nan, math.inf


def ratio_and_gradient(part, new, old, mask=None, upstream=None, **columns):
    """r [B,T] and d sum(upstream * r) / d logp_new."""
    live = torch.tensor(new, dtype=torch.float64, requires_grad=True)
    mask = torch.ones_like(live).bool() if mask is None else torch.tensor(mask, dtype=torch.bool)
    given = {k: torch.tensor(v, dtype=torch.float64) for k, v in {"logp_old": old, **columns}.items()}
    batch = RolloutBatch({"response_mask": mask, "group": torch.zeros(len(mask), dtype=torch.int64), **given})
    ratio = part(PolicyTerms(live, batch))
    weights = torch.ones_like(ratio) if upstream is None else torch.tensor(upstream, dtype=torch.float64)
    return ratio.detach(), torch.autograd.grad((weights * ratio).sum(), live)[0]


def test_a_token_ratio_is_the_exponential_of_the_log_difference():
    r, grad = ratio_and_gradient(create("ratio", "token"), [[math.log(0.6), math.log(0.1)]], [[math.log(0.3)] * 2])
    assert r.tolist() == [pytest.approx([2.0, 1 / 3])]
    assert grad.tolist() == [pytest.approx([2.0, 1 / 3])]


def test_the_log_ratio_is_bounded_and_carries_no_gradient_beyond_the_bound():
    part = create("ratio", "token", log_clamp=1.0)
    r, grad = ratio_and_gradient(part, [[-1.0, -1.0, -3.0]], [[-2.5, -1.5, -1.0]])
    assert r.tolist() == [pytest.approx([math.e, math.exp(0.5), 1 / math.e])]
    assert grad.tolist() == [pytest.approx([0.0, math.exp(0.5), 0.0])]


@pytest.mark.parametrize("log_clamp", [20.0, None])
def test_a_token_the_old_policy_called_impossible_gets_the_largest_ratio_and_no_nan_gradient(log_clamp):
    part = create("ratio", "token", log_clamp=log_clamp)
    r, grad = ratio_and_gradient(part, [[-1.0, -1.0]], [[-INF, -1.0]], upstream=[[0.0, 1.0]])
    assert r.tolist() == [[math.inf if log_clamp is None else pytest.approx(math.exp(20)), 1.0]]
    assert grad.tolist() == [[0.0, 1.0]]


def test_the_denominator_may_be_the_engines_policy_and_unknown_log_probs_fall_back_to_the_old_one():
    part = create("ratio", "token", denominator="logp_rollout")
    r, _ = ratio_and_gradient(part, [[-1.0, -1.0]], [[-1.0, -1.5]], logp_rollout=[[-2.0, NAN]])
    assert r.tolist() == [pytest.approx([math.e, math.exp(0.5)])]
    assert part.requires == {"logp_rollout"}


def test_a_sequence_ratio_is_the_geometric_mean_of_the_rows_token_ratios():
    r, _ = ratio_and_gradient(
        create("ratio", "sequence"), [[-0.5, -1.0, 7.0], [-1.0, -1.0, -1.0]], [[-0.8, -1.4, 3.0], [-1.0] * 3],
        [[1, 1, 0], [1, 1, 1]],
    )  # fmt: skip
    assert r.tolist() == [pytest.approx([math.exp(0.35), math.exp(0.35), 1.0]), pytest.approx([1.0] * 3)]


def test_with_token_gradient_a_token_moves_only_its_own_ratio():
    _, grad = ratio_and_gradient(
        create("ratio", "sequence", gradient="token"), [[-0.5, -1.0]], [[-0.8, -1.4]], upstream=[[1.0, 0.0]]
    )
    assert grad.tolist() == [pytest.approx([math.exp(0.35), 0.0])]


def test_with_sequence_gradient_a_token_moves_the_ratio_of_the_whole_row():
    part = create("ratio", "sequence", gradient="sequence")
    _, grad = ratio_and_gradient(part, [[-0.5, -1.0]], [[-0.8, -1.4]], upstream=[[1.0, 0.0]])
    assert grad.tolist() == [pytest.approx([math.exp(0.35) / 2] * 2)]


def test_a_rows_gradient_is_the_same_in_both_forms_when_its_tokens_are_averaged():
    new, old, mean = [[-0.5, -1.0, -2.0]], [[-0.8, -1.4, -1.8]], [[1 / 3] * 3]
    _, token = ratio_and_gradient(create("ratio", "sequence", gradient="token"), new, old, upstream=mean)
    _, sequence = ratio_and_gradient(create("ratio", "sequence", gradient="sequence"), new, old, upstream=mean)
    torch.testing.assert_close(token, sequence)


@pytest.mark.parametrize("gradient", ["token", "sequence"])
def test_the_rows_log_ratio_is_bounded_above(gradient):
    part = create("ratio", "sequence", gradient=gradient)
    r, grad = ratio_and_gradient(part, [[-1.0, -1.0]], [[-INF, -1.0]])
    assert r.tolist() == [pytest.approx([math.exp(10)] * 2)]
    assert grad.tolist() == [[0.0, 0.0]]


@pytest.mark.parametrize("gradient", ["token", "sequence"])
def test_a_token_the_new_policy_calls_impossible_makes_the_rows_ratio_zero(gradient):
    r, grad = ratio_and_gradient(create("ratio", "sequence", gradient=gradient), [[-INF, -1.0]], [[-1.0, -1.0]])
    assert r.tolist() == [[0.0, 0.0]]
    assert grad.tolist() == [[0.0, 0.0]]


@pytest.mark.parametrize(
    "part",
    [create("ratio", "token"), create("ratio", "sequence"), create("ratio", "sequence", gradient="sequence")],
    ids=["token", "sequence-token", "sequence"],
)
def test_garbage_under_the_mask_touches_neither_value_nor_gradient(part):
    mask, upstream = [[1, 1, 0], [0, 0, 0]], [[1.0, 2.0, NAN], [NAN] * 3]
    clean = ratio_and_gradient(part, [[-1.0, -2.0, 0.0], [0.0] * 3], [[-1.5, -1.0, 0.0], [0.0] * 3], mask)
    dirty = ratio_and_gradient(
        part, [[-1.0, -2.0, NAN], [NAN, INF, -INF]], [[-1.5, -1.0, INF], [NAN] * 3], mask, upstream=None
    )
    torch.testing.assert_close(dirty, clean)
    _, grad = ratio_and_gradient(part, [[-1.0, -2.0, NAN], [NAN] * 3], [[-1.5, -1.0, NAN], [NAN] * 3], mask, upstream)
    assert torch.isfinite(grad).all()


@pytest.mark.parametrize("name", ["token", "sequence"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_ratio_keeps_the_dtype_of_the_log_probs(name, dtype):
    columns = {"response_mask": torch.ones(1, 2).bool(), "group": torch.zeros(1), "logp_old": -torch.ones(1, 2)}
    terms = PolicyTerms(-2 * torch.ones(1, 2, dtype=dtype, requires_grad=True), RolloutBatch(columns))
    ratio = create("ratio", name)(terms)
    assert ratio.dtype == dtype
    assert ratio.tolist() == [pytest.approx([math.exp(-1)] * 2, rel=1e-2)]
