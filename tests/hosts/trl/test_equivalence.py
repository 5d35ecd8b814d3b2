"""The trainer against TRL's own: identical without plug-ins, equal to its loss with the plug-ins that say the same."""

from __future__ import annotations

import pytest
import torch
from trl import GRPOTrainer
from trl_tiny import TRL_EQUIVALENT, logs, run, weights


def _distance(a, b):
    first, second = weights(a), weights(b)
    return max(float((first[name] - second[name]).abs().max()) for name in first)


def test_without_plugins_a_run_is_bit_for_bit_trls(model, tmp_path):
    settings = {"gradient_accumulation_steps": 2, "num_iterations": 2, "max_steps": 4}
    ours = run(model, tmp_path / "a", **settings)
    theirs = run(model, tmp_path / "b", cls=GRPOTrainer, **settings)
    assert logs(ours) == logs(theirs)
    assert _distance(ours, theirs) == 0.0


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"gradient_accumulation_steps": 2, "steps_per_generation": 2, "num_iterations": 2},
        {"num_iterations": 2, "steps_per_generation": 1},
        {"beta": 0.1, "num_iterations": 2},
        {"beta": 0.1, "use_bias_correction_kl": False, "mask_truncated_completions": True},
        {"entropy_coef": 0.05},
        {"reward_weights": [2.0, -0.5], "temperature": 0.8},
    ],
    ids=["plain", "accumulated", "iterated", "kl", "uncorrected-kl", "entropy", "weighted"],
)
def test_plugins_that_say_dapo_train_like_trls_dapo(model, tmp_path, settings):
    settings = {"optim": "sgd", "learning_rate": 0.5, **settings}  # AdamW divides rounding errors by tiny gradients
    ours = run(model, tmp_path / "a", plugins=TRL_EQUIVALENT, **settings)
    theirs = run(model, tmp_path / "b", cls=GRPOTrainer, **settings)
    names = ("loss", "grad_norm", "reward", "kl", "entropy", "clip_ratio/region_mean", "completions/mean_length")
    for mine, his in zip(logs(ours, *names), logs(theirs, *names)):
        assert mine == pytest.approx(his, abs=1e-6, rel=1e-5)
    assert _distance(ours, theirs) < 1e-6
    assert torch.isfinite(torch.tensor([row["loss"] for row in logs(ours)])).all()


@pytest.mark.parametrize(
    ("loss_type", "plugins"),
    [
        ("grpo", {"aggregate": "seq_mean_token_mean"}),
        ("bnpo", {"aggregate": "bnpo"}),
        ("cispo", {"clip": {"name": "cispo", "ratio_high": 1.2}}),
        ("sapo", {"clip": "sapo", "aggregate": "seq_mean_token_mean"}),
    ],
)
def test_other_loss_types_of_trl_have_their_plugins(model, tmp_path, loss_type, plugins):
    settings = {"optim": "sgd", "learning_rate": 0.5, "num_iterations": 2, "gradient_accumulation_steps": 2}
    epsilon = {"epsilon_high": 1.2} if loss_type == "cispo" else {}
    ours = run(model, tmp_path / "a", plugins={**TRL_EQUIVALENT, **plugins}, **settings)
    theirs = run(model, tmp_path / "b", cls=GRPOTrainer, loss_type=loss_type, **epsilon, **settings)
    for mine, his in zip(logs(ours, "loss", "grad_norm"), logs(theirs, "loss", "grad_norm")):
        assert mine == pytest.approx(his, abs=1e-6, rel=1e-5)
    assert _distance(ours, theirs) < 1e-6
