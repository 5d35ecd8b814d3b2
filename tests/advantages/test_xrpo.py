"""XRPO: a bonus for successes that are less likely than their group."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlx_plugins import RolloutBatch, create
from rlx_plugins.testing import evaluate

ROW = st.tuples(st.sampled_from([0.0, 1.0, math.nan]), st.lists(st.floats(-5, 0), max_size=4))


def run(rows, **params):
    width = max(1, max(len(logp) for _, logp in rows))
    inputs = {
        "rewards": [r for r, _ in rows],
        "group": [3] * len(rows),
        "logp_old": [logp + [None] * (width - len(logp)) for _, logp in rows],
        "response_mask": [[1] * len(logp) + [0] * (width - len(logp)) for _, logp in rows],
    }
    out = evaluate("advantage", "xrpo", inputs, params)
    return out["advantages"].tolist(), out["novelty"].tolist()


@settings(max_examples=80, deadline=None)
@given(st.lists(ROW, min_size=1, max_size=8), st.sampled_from([0.0, 0.7, 2.5]), st.sampled_from([0.0, 0.5, 2.0]))
def test_the_bonus_is_what_the_equations_say(rows, weight, cap):
    got, novelty = run(rows, lambda_novelty=weight, kappa_clip=cap)
    scored = [r for r, _ in rows if not math.isnan(r)]
    mean = sum(scored) / max(len(scored), 1)
    std = torch.tensor(scored, dtype=torch.float64).std().item() if len(scored) > 1 else 0.0
    likely = [sum(logp) / len(logp) for r, logp in rows if logp and not math.isnan(r)]
    for (r, logp), a, eta in zip(rows, got, novelty, strict=True):
        want_eta = math.exp(sum(logp) / len(logp) - sum(likely) / len(likely)) if logp and likely else 1.0
        assert eta == pytest.approx(want_eta)
        plain = (r - mean) / (std + 1e-6) if len(scored) > 1 and not math.isnan(r) else 0.0
        bonus = min(max(weight * (1 - want_eta), 0), cap * plain) if plain > 0 else 0.0
        assert a == pytest.approx(plain + bonus, abs=1e-8)


def test_shifting_all_log_probs_of_a_group_changes_nothing():
    rows = [(1.0, [-1.0, -2.0]), (1.0, [-3.0]), (0.0, [-0.5])]
    shifted = [(r, [x - 1.5 for x in logp]) for r, logp in rows]
    assert run(rows)[0] == pytest.approx(run(shifted)[0])


def test_equally_likely_rollouts_and_equal_rewards_leave_grpo():
    rows = [(1.0, [-1.0, -1.0]), (0.0, [-1.0]), (0.0, [-1.0])]
    assert run(rows)[0] == pytest.approx(run(rows, lambda_novelty=0.0)[0])
    assert run([(1.0, [-1.0]), (1.0, [-4.0])])[0] == [0, 0]
    assert run([(1.0, [-4.0])])[0] == [0]


def test_a_base_with_credit_per_token_is_sharpened_token_by_token():
    batch = RolloutBatch(
        {
            "rewards": torch.tensor([1.0, 0.0], dtype=torch.float64),
            "group": torch.tensor([0, 0]),
            "response_mask": torch.ones(2, 2, dtype=torch.bool),
            "logp_old": torch.tensor([[-4.0, -4.0], [-1.0, -1.0]], dtype=torch.float64),
        }
    )
    base = {"name": "reinforce_pp", "discount": 0.5}
    plain = create("advantage", "reinforce_pp", discount=0.5)(batch)["advantages"]
    got = create("advantage", "xrpo", base=base)(batch)["advantages"]
    assert plain[0, 1] > plain[0, 0]
    bonus = 2.5 * (1 - math.exp(-1.5))
    want = torch.where(plain > 0, plain + (0.5 * plain).clamp(max=bonus), plain)
    torch.testing.assert_close(got, want)
