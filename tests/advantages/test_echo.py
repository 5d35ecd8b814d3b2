"""ECHO's shaping: identity, bounds, invariance, the additive term, and where confidence comes from."""

import math

import pytest
import torch

from rlx_plugins import ConfigError, HostProfile, RolloutBatch, build, create
from rlx_plugins.testing import evaluate

ROWS = {
    "advantages": [0.8, -1.1, 0.0],
    "entropy": [[0.2, 1.5, 0.4], [2.5, 0.1, 0.0], [0.3, 0.6, 0.9]],
    "confidence": [[0.95, 0.5, 0.9], [0.3, 0.99, 0.0], [0.2, 0.8, 0.7]],
    "response_mask": [[1, 1, 1], [1, 1, 0], [1, 1, 1]],
    "group": [0, 0, 1],
}
MASK = torch.tensor(ROWS["response_mask"]).bool()
BASE = torch.tensor(ROWS["advantages"], dtype=torch.float64)[:, None] * MASK


def form(params=None, **changes):
    return evaluate("advantage", "echo", {**ROWS, **changes}, params)


def test_without_coefficients_it_is_the_base():
    assert torch.equal(form({"mult_coeff": 0.0})["advantages"], BASE)


def test_signs_stay_and_the_change_is_bounded():
    out = form({"mult_coeff": 0.45, "s_max": 2.0})["advantages"]
    assert torch.equal(out.sign(), BASE.sign())
    live = BASE != 0
    assert ((out / BASE)[live] - 1).abs().max() <= 0.9 + 1e-12


def test_the_level_and_scale_of_entropies_do_not_matter():
    moved = (torch.tensor(ROWS["entropy"]) * 3 + 7).tolist()
    torch.testing.assert_close(form(entropy=moved)["score"], form()["score"], atol=1e-6, rtol=0)


def test_constant_uncertainty_and_a_single_token_have_score_zero():
    constant = form(entropy=[[2.0] * 3] * 3, confidence=[[0.3] * 3] * 3)
    assert constant["score"].abs().max() < 1e-9
    one = form(response_mask=[[1, 0, 0], [0, 0, 0], [0, 0, 0]])
    assert not one["score"].any() and one["advantages"][0, 0] == 0.8


def test_an_uncertain_token_moves_more():
    out = form()["advantages"]
    assert out[0, 1] > 0.8 > out[0, 0] and out[1, 0] < -1.1 < out[1, 1]


def test_a_group_without_advantage_stays_dead_unless_something_is_added():
    assert not form()["advantages"][2].any()
    added = form({"mult_coeff": 0.0, "add_coeff": 0.5})["advantages"] - BASE
    assert added[2].any()
    assert float(added[:2].sum()) == pytest.approx(0, abs=1e-12) and float(added[2].sum()) == pytest.approx(
        0, abs=1e-12
    )


def test_the_bound_is_an_option_and_confidence_is_clipped():
    assert form({"s_max": None})["score"].max() > 2
    wild = [[0.95, 0.5, 0.9], [0.3, 0.99, 0.0], [0.2, 0.8, 7.0]]
    tame = [[0.95, 0.5, 0.9], [0.3, 0.99, 0.0], [0.2, 0.8, 1.0]]
    assert torch.equal(form(confidence=wild)["score"], form(confidence=tame)["score"])


def test_garbage_under_the_mask_does_not_matter():
    dirty = [[0.2, 1.5, 0.4], [2.5, 0.1, math.nan], [0.3, 0.6, 0.9]]
    sure = [[0.95, 0.5, 0.9], [0.3, 0.99, math.nan], [0.2, 0.8, 0.7]]
    assert torch.equal(form(entropy=dirty, confidence=sure)["advantages"], form()["advantages"])


def batch():
    g = torch.Generator().manual_seed(0)
    return RolloutBatch(
        {
            "rewards": torch.tensor([1.0, 0.0, 0.5]).double(),
            "group": torch.tensor([0, 0, 0]),
            "response_mask": MASK,
            "entropy": torch.rand(3, 3, generator=g).double(),
            "logp_old": -torch.rand(3, 3, generator=g).double(),
        }
    )


def test_the_sampled_tokens_probability_can_stand_for_the_confidence():
    part, given = create("advantage", "echo", confidence="sampled"), batch()
    want = create("advantage", "echo")(given.with_columns(confidence=given.logp_old.exp()))
    assert torch.equal(part(given)["echo_score"], want["echo_score"])
    grpo = create("advantage", "grpo")(given)["advantages"]
    torch.testing.assert_close(part(given)["advantages"], grpo * (1 + 0.1 * want["echo_score"]))


def test_a_ragged_confidence_column_is_read_as_it_comes():
    given = batch()
    rows = given.logp_old.exp().tolist()
    ragged = given.with_columns(confidence=[rows[0], rows[1][:2], rows[2]])
    part = create("advantage", "echo")
    assert torch.equal(
        part(ragged)["echo_score"], part(given.with_columns(confidence=given.logp_old.exp()))["echo_score"]
    )


def test_a_host_without_confidences_is_told_so():
    host = HostProfile("any", signals=frozenset({"entropy", "logp_old"}))
    with pytest.raises(ConfigError, match="advantage echo needs the signal 'confidence'"):
        build({"advantage": "echo"}, host)
    parts = build({"method": {"name": "echo", "confidence": "sampled", "base": "rloo"}}, host)
    assert parts.one("advantage").estimator.name == "rloo" and parts.one("clip").confidence == "sampled"
