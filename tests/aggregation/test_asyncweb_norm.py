"""AsyncWebRL's constant normaliser against the per-episode one, and its staleness cap."""

import math

import pytest
import torch

import rlx_plugins as rlx
from rlx_plugins.testing import evaluate
from rlx_plugins.testing.evaluation.building import reward_batch

CASE = {
    "episode_rewards": [1.0, 0.0, 1.0, 0.0],
    "episode_group": [0, 0, 0, 0],
    "row_episode": [0, 1, 1, 2, 3, 3, 3],
    "response_mask": [[1, 1], [1, 1], [1, 0], [1, 0], [1, 1], [0, 0], [1, 1]],
}
STEPS = [1, 2, 1, 2]  # the empty row of the last episode is no step


def run(**params):
    return evaluate("selector", "asyncweb_norm", CASE, params)


def test_a_constant_gives_every_episode_the_same_credit_per_row_whatever_its_length():
    advantages = run()["advantages"]
    assert advantages.abs().unique().numel() == 1 and float(advantages[0]) == pytest.approx(0.1, abs=1e-6)


def test_the_trajectory_mode_hands_every_episode_its_advantage_once():
    out = run(mode="trajectory")
    assert out["n_steps"].tolist() == STEPS
    live = torch.tensor(CASE["response_mask"]).any(1)
    for e in range(4):
        rows = live & (torch.tensor(CASE["row_episode"]) == e)
        torch.testing.assert_close(out["advantages"][rows].sum(), out["episode_advantages"][e])


def test_the_two_modes_differ_by_steps_over_k():
    constant, trajectory = run(k=5.0)["token_weights"], run(mode="trajectory")["token_weights"]
    for row, e in enumerate(CASE["row_episode"]):
        torch.testing.assert_close(constant[row], trajectory[row] * STEPS[e] / 5)


def test_token_weights_sum_to_the_kept_share_over_k():
    assert float(run(k=4.0)["token_weights"].sum()) == pytest.approx(0.25)
    prox = torch.zeros(7, 2).double()
    rollout = torch.tensor([[0.0, -2.0]] * 7).double()  # ratio e^2 > 5 on every second token
    out = evaluate("selector", "asyncweb_norm", {**CASE, "logp_old": prox, "logp_rollout": rollout}, {"k": 4.0})
    assert float(out["token_weights"].sum()) == pytest.approx(0.25 * 6 / 10), "capped tokens stay in the denominator"


def test_unscorable_and_single_episodes_have_no_advantage_and_are_not_counted():
    inputs = {**CASE, "episode_rewards": [1.0, 0.0, None, 0.0], "episode_group": [0, 0, 0, 1]}
    assert evaluate("selector", "asyncweb_norm", inputs)["episode_advantages"].tolist() == pytest.approx(
        [1, -1, 0, 0], abs=1e-5
    )


def test_the_loss_is_a_token_mean_with_scaled_advantages():
    out = run(k=4.0)
    token_loss = torch.arange(14, dtype=torch.float64).reshape(7, 2)
    mask = torch.tensor(CASE["response_mask"]).double()
    z = out["episode_advantages"][torch.tensor(CASE["row_episode"])][:, None]
    scaled = (out["advantages"][:, None] * token_loss * mask).sum() / mask.sum()
    torch.testing.assert_close((out["token_weights"] * z * token_loss).sum(), scaled)


@pytest.mark.parametrize(
    ("logp_rollout", "kept"),
    [(math.nan, True), (-math.log(5) + 1e-9, True), (-math.log(5) - 1e-9, False), (3.0, True)],
    ids=["unknown", "just below the cap", "just above", "far below"],
)
def test_the_cap_drops_tokens_the_policy_moved_towards(logp_rollout, kept):
    batch = reward_batch(response_mask=[[1, 0]]).with_columns(
        logp_old=torch.tensor([[0.0, math.nan]], dtype=torch.float64),
        logp_rollout=torch.tensor([[logp_rollout, math.nan]], dtype=torch.float64),
    )
    columns = rlx.create("aggregate", "asyncweb_norm")(batch, batch.response_mask)
    assert columns["weight"].tolist() == [[0.1 if kept else 0.0, 0.0]] and columns["count"].tolist() == [1.0]


def test_a_fully_masked_batch_weighs_nothing():
    out = evaluate("selector", "asyncweb_norm", {**CASE, "response_mask": torch.zeros(7, 2)}, {"mode": "trajectory"})
    assert not out["token_weights"].any() and out["n_steps"].tolist() == [1] * 4


def test_it_asks_for_what_its_mode_and_cap_read():
    assert rlx.create("aggregate", "asyncweb_norm").requires == {"logp_old", "logp_rollout"}
    assert rlx.create("aggregate", "asyncweb_norm", ratio_cap=None, mode="trajectory").requires == {"episode"}
