"""IAPO: mass, sign and bounds of the redistribution, and how it reads the evidence graph."""

import math

import pytest
import torch

from rlx_plugins import HostProfile, RolloutBatch, build, create
from rlx_plugins.testing import evaluate

ROWS = {
    "rewards": [1.0, 0.0, 0.0],
    "group": [0, 0, 0],
    "turn_ids": [[0, 0, 1, 1, 1, 2, -1], [0, -1, 1, 1, 2, 2, 2], [0, 0, 0, -1, 1, 1, -1]],
    "support_edges": [[0, 0, 2], [1, 0, 1]],
    "failed_edges": [[1, 1, 2]],
    "error": [[0, 1, 0], [0, 1, 0], [0, 0]],
    "direct_user": [[1, 0, 0], [0, 0, 0], [0, 0]],
}


def form(params=None, **changes):
    return evaluate("advantage", "iapo", {**ROWS, **changes}, params)


@pytest.mark.parametrize("params", [{}, {"beta_pos": 2.0, "clip_c": 0.9}])
def test_the_sum_over_tokens_and_the_sign_stay_those_of_the_trajectory(params):
    out = form(params)
    live = torch.tensor(ROWS["turn_ids"]) >= 0
    outcome = out["trajectory_advantage"]
    torch.testing.assert_close(out["advantages"].sum(1), outcome * live.sum(1))
    assert torch.equal(out["advantages"].sign(), outcome.sign()[:, None] * live)


def test_weights_are_bounded():
    c = 0.4
    out = form({"clip_c": c, "beta_pos": 0.0}, support_edges=[[0, 0, 1], [0, 0, 2], [1, 0, 1]])
    weights = torch.tensor([w for row in out["weights"] for w in row])
    assert weights.min() >= math.exp(-2 * c) and weights.max() <= math.exp(2 * c)


def test_without_any_annotation_it_is_the_base():
    nothing = {"support_edges": [], "failed_edges": None, "error": None, "direct_user": [[0] * 3, [], []]}
    out = form(**nothing)
    assert all(w == pytest.approx(1, abs=1e-8) for row in out["weights"] for w in row)
    grpo = evaluate("advantage", "grpo", {k: ROWS[k] for k in ("rewards", "group")})["advantages"]
    torch.testing.assert_close(out["advantages"][:, 0], grpo)


def test_a_supporting_turn_of_a_success_gains_and_an_erroneous_one_of_a_failure_pays():
    base = form(support_edges=[], direct_user=None)["weights"]
    more = form(direct_user=None)["weights"]
    assert more[0][0] / more[0][1] > base[0][0] / base[0][1]
    assert base[1][1] > base[1][0] == pytest.approx(base[1][2]), "a turn without an error has the lowest score"


def test_a_duplicate_edge_counts_once_and_one_to_no_turn_is_dropped():
    want = form()
    edges = [*ROWS["support_edges"], [0, 0, 2], [0, 2, 3], [2, 1, 5], [1, -1, 1], [0, 2, 1]]
    got = form(support_edges=edges)
    assert torch.equal(got["advantages"], want["advantages"])


def test_a_turn_without_tokens_has_no_weight_and_can_still_be_pointed_at():
    turns = [[0, 0, 2, 2], [0, 1, 1, 1], [0, 0, 1, 1]]
    out = form(turn_ids=turns, support_edges=[[0, 0, 1]], direct_user=None, error=None)
    assert out["weights"][0][1] == 0 and out["weights"][0][0] > 1 > out["weights"][0][2]
    torch.testing.assert_close(out["advantages"].sum(1), 4 * out["trajectory_advantage"])


def test_equal_rewards_give_nothing_and_a_masked_row_is_no_trouble():
    assert not form(rewards=[0.3] * 3)["advantages"].any()
    out = form(turn_ids=[*ROWS["turn_ids"][:2], [-1] * 7])
    assert not out["advantages"][2].any() and torch.isfinite(out["advantages"]).all()


def test_any_estimator_can_stand_underneath_and_keeps_its_state():
    part = create("advantage", "iapo", base={"name": "avspo", "initial_threshold": 0.01})
    columns = {name: torch.tensor(ROWS[name]) for name in ("rewards", "group", "turn_ids")}
    edges = {"support_edges": [[[0, 2]], [], []], "failed_edges": [[]] * 3, "error": [[]] * 3, "direct_user": [[]] * 3}
    batch = RolloutBatch({**columns, **edges, "response_mask": columns["turn_ids"] >= 0})
    out = part(batch)
    assert "virtual_samples" in out and part.state_dict()["base"]["previous_mean"] == pytest.approx(1 / 3)
    avspo = create("advantage", "avspo", initial_threshold=0.01)(batch)["advantages"]
    torch.testing.assert_close(out["advantages"].sum(1), avspo.sum(1))
    host = HostProfile("any", signals=frozenset({"turn_ids", *edges, "reward_components", "logp_old"}))
    assert build({"advantage": {"name": "iapo", "base": "dvao"}}, host).one("advantage").credits == "reward_components"
