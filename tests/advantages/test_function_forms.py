"""The function forms take the papers' names and the library's, and treat what can't be scored as the plug-ins do."""

import math

import numpy as np
import pytest
import torch

from rlx_plugins.testing import evaluate

TREE = {
    "block_start": [-1, 0, 0, -1],
    "block_end": [0, -1, -1, -1],
    "block_reward": [0.0, 1.0, 0.25, 0.0],
    "block_embedding": [[1.0, 0.0], [0.6, 0.8], [1.0, 0.0], [1.0, 1.0]],
    "block_ids": [[0, 1, 1], [0, 2, -1], [3, 3, 3]],
}
TURNS = {"rewards": [1.0, 0.0], "group": [0, 0], "turn_ids": [[0, 1], [0, 1]], "info_gain": [[2.0], [1.0]]}
REWARDS = {"rewards": [1.0, 0.2, None, 0.4, 0.4, 0.4], "group": [3, 3, 3, 1, 1, 1]}
TOKENS = {"token_rewards": [[0.0, 1.0], [0.5, 0.0]], "response_mask": [[1, 1], [1, 0]]}
LEAD = {"reward_components": [[1, 0.8], [0, -0.3]], "group": [0, 0], "response_mask": [[1, 1], [1, 0]]}
LENGTHS = {"correct": [1, 0], "group": [0, 0], "response_mask": [[1, 0], [1, 1]]}


@pytest.mark.parametrize(
    ("kind", "name", "inputs", "paper", "library"),
    [
        ("advantage", "rloo", REWARDS | {"kl": [0.1, 0.4, 0.0, 0.0, 0.2, 0.0]}, {"beta": 0.5}, {"kl_coef": 0.5}),
        ("advantage", "reinforce_pp", TOKENS, {"gamma": 0.5}, {"discount": 0.5}),
        (
            "advantage",
            "gapo_snr",
            REWARDS,
            {"tau": 0.9, "norm_by_std": False, "centre": "mean"},
            {"share": 0.9, "normalize": False, "center": "mean"},
        ),
        (
            "advantage",
            "avspo",
            REWARDS,
            {"alpha": 2, "r_anchor": 0.3, "tau_init": 0.2, "eta": 0.2, "tau_collapse": 0.1},
            {
                "ladder_exponent": 2,
                "anchor_reward": 0.3,
                "initial_threshold": 0.2,
                "threshold_rate": 0.2,
                "collapse_std": 0.1,
            },
        ),
        (
            "advantage",
            "lead",
            LEAD,
            {"potential_alpha": 2.0, "ema": 0.5, "w_min": 0.1},
            {"potential_exponent": 2.0, "decay": 0.5, "min_correct_weight": 0.1},
        ),
        ("advantage", "lead", LEAD, {"static": 0.7}, {"static_correct_weight": 0.7}),
        ("reward", "alp", LENGTHS, {"beta": 0.1}, {"penalty_coef": 0.1}),
        ("reward", "lead", LENGTHS, {"l_min": 1, "l_max": 5}, {"min_target": 1, "max_target": 5}),
    ],
)
def test_a_parameter_has_the_papers_name_and_the_librarys(kind, name, inputs, paper, library):
    want, default = evaluate(kind, name, inputs, paper), evaluate(kind, name, inputs)
    got = evaluate(kind, name, inputs, library)
    assert str(got) == str(want) != str(default)


@pytest.mark.parametrize("as_array", [np.array, torch.tensor])
@pytest.mark.parametrize(
    ("name", "inputs", "params"),
    [
        ("datpo", TREE, {}),
        ("reinforce_pp", TOKENS, {}),
        ("a2tgpo", TURNS, {}),
        ("dvao", {"reward_components": [[1.0, 0.2], [0.0, 0.9]], "group": [0, 0]}, {"weights": [0.3, 0.7]}),
        ("rloo", {"rewards": [1.0, 0.0], "group": [0, 0]}, {"reward_clip": [0.25, 0.75]}),
    ],
)
def test_arrays_and_tensors_are_as_good_as_lists(name, inputs, params, as_array):
    arrays = [{k: as_array(v) for k, v in given.items()} for given in (inputs, params)]
    assert str(evaluate("advantage", name, *arrays)) == str(evaluate("advantage", name, inputs, params))


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo", "gapo_snr", "avspo"])
@pytest.mark.parametrize("unscorable", [None, math.nan, math.inf])
def test_a_missing_reward_has_advantage_zero_and_moves_no_other(name, unscorable):
    got = evaluate("advantage", name, {"rewards": [1.0, 0.25, unscorable, 0.5], "group": [0, 0, 0, 1]})["advantages"]
    without = evaluate("advantage", name, {"rewards": [1.0, 0.25, 0.5], "group": [0, 0, 1]})["advantages"]
    assert got[2] == 0
    torch.testing.assert_close(got[[0, 1, 3]], without)


def dr_grpo_loss(token_loss, mask, **params):
    rows = {"rewards": [0.0] * len(mask), "group": [0] * len(mask)}
    return float(
        evaluate("advantage", "dr_grpo", rows | {"token_loss": token_loss, "response_mask": mask}, params)["loss"]
    )


def test_dr_grpos_loss_grows_with_a_rows_tokens_and_not_with_padding():
    short = dr_grpo_loss([[2.0, 9.0], [0.0, 9.0]], [[1, 0], [1, 0]], loss_norm=10)
    assert short == pytest.approx(2.0 / 10 / 2)
    assert dr_grpo_loss([[2.0, 2.0], [0.0, 9.0]], [[1, 1], [1, 0]], loss_norm=10) == pytest.approx(2 * short)
    padded = dr_grpo_loss([[2.0, math.nan, 9.0], [0.0, 9.0, 9.0]], [[1, 0, 0], [1, 0, 0]], loss_norm=10)
    assert padded == pytest.approx(short)


def test_dr_grpos_loss_divides_by_the_rows_with_tokens_or_by_the_number_given():
    token_loss, mask = [[1.0], [3.0], [9.0]], [[1], [1], [0]]
    assert dr_grpo_loss(token_loss, mask) == pytest.approx(2.0)
    assert dr_grpo_loss(token_loss, mask, batch_norm=8) == pytest.approx(0.5)
    assert dr_grpo_loss(token_loss, [[0], [0], [0]]) == 0
