"""HAPO's clip: one side of the range widens with the entropy score."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import rlx_plugins as rlx
from rlx_plugins.testing import evaluate
from rlx_plugins.testing.evaluation.building import run_loss


def clip(h, ratio, advantages, mask=None, **params):
    logs = [[None if r is None else math.log(r) for r in row] for row in ratio]
    inputs = {
        "logp_new": logs,
        "logp_old": [[0.0 for _ in row] for row in ratio],
        "advantages": advantages,
        "response_mask": mask or [[1 for _ in row] for row in ratio],
        "h": h,
    }
    return evaluate("clip", "hapo", inputs, params)


@settings(max_examples=60, deadline=None)
@given(
    st.floats(-1.5, 1.5),
    st.floats(0.01, 30),
    st.sampled_from([-2.0, 0.0, 1.5]),
    st.sampled_from([0.0, 0.5, 1.0]),
)
def test_value_and_gradient_of_a_token_are_those_of_the_equation(h, r, a, alpha):
    out = clip([[h]], [[r]], [a], alpha=alpha, eps_low=0.3, eps_high=0.2, dual_clip=5.0)
    h = min(max(h, -1), 1)
    low, high = 0.3 * (1 + alpha * max(-h, 0)), 0.2 * (1 + alpha * max(h, 0))
    clipped = min(max(r, 1 - low), 1 + high)
    want, moves = max(-a * r, -a * clipped), -a * r >= -a * clipped
    if a < 0 and want > -a * 5:
        want, moves = -a * 5, False
    assert float(out["loss"]) == pytest.approx(want)
    assert float(out["grad_logp"]) == pytest.approx(-a * r if moves else 0.0, abs=1e-9)
    assert float(out["eps_low"]) == pytest.approx(low) and float(out["eps_high"]) == pytest.approx(high)


@pytest.mark.parametrize(("h", "params"), [(0.0, {}), (-0.7, {"alpha": 0.0}), (None, {})])
def test_without_a_score_or_alpha_it_is_ppo_with_a_dual_clip(h, params):
    ratio, advantages = [[0.5, 1.0, 1.4], [0.3, 1.1, 20.0]], [1.0, -0.5]
    out = clip([[h] * 3] * 2, ratio, advantages, **params)
    plain = run_loss(
        {"clip": rlx.create("clip", "ppo", dual_clip=10.0)},
        logp_new=torch.tensor(ratio, dtype=torch.float64).log(),
        logp_old=torch.zeros(2, 3, dtype=torch.float64),
        advantages=advantages,
        response_mask=[[1] * 3] * 2,
    )
    for name in ("loss", "per_token_loss", "grad_logp"):
        torch.testing.assert_close(out[name], plain[name])


def test_on_policy_the_loss_is_minus_the_mean_advantage():
    assert float(clip([[0.9, -0.9], [0.1, 0.0]], [[1.0] * 2] * 2, [2.0, -1.0])["loss"]) == pytest.approx(-0.5)


def test_garbage_under_the_mask_reaches_neither_loss_nor_gradient():
    out = clip([[0.5, None]], [[1.1, None]], [[1.0, float("nan")]], mask=[[1, 0]])
    assert float(out["loss"]) == pytest.approx(-1.1) and out["grad_logp"].tolist()[0] == pytest.approx([-1.1, 0])


def test_in_the_released_scope_the_score_is_made_of_the_micro_batchs_entropies():
    part = rlx.create("clip", "hapo", statistics="micro", quantile=0.5)
    batch = rlx.RolloutBatch(
        {"response_mask": torch.tensor([[True, True, True, False]]), "group": torch.zeros(1, dtype=torch.int64)}
    )
    entropy = torch.tensor([[0.1, 1.0, 10.0, torch.nan]], dtype=torch.float64)
    low, high = part.bounds(rlx.PolicyTerms(torch.zeros(1, 4), batch, entropy=entropy))
    assert low[0, :3].tolist() == pytest.approx([0.4, 0.2, 0.2]) and high[0, :3].tolist() == pytest.approx(
        [0.2, 0.2, 0.4]
    )
    low, high = part.replace(signed=False).bounds(rlx.PolicyTerms(torch.zeros(1, 4), batch, entropy=entropy))
    assert low[0, :3].tolist() == pytest.approx([0.2] * 3) and high[0, :3].tolist() == pytest.approx([0.4, 0.2, 0.4])
