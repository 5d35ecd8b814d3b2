"""What shapers take for a right answer: a host's judgement, a column of numbers, or the rewards."""

import math

import pytest
import torch

from rlx_plugins import ConfigError, RolloutBatch, create

PARAMETERS = {
    "alp": {},
    "apriel": {"max_tokens": 4, "buffer_tokens": 3},
    "cadence": {},
    "hbpo": {"max_length": 8},
    "lead": {"sum_weights": (1.0, 1.0)},
    "meds": {"features": "column"},
}
"""Every shaper that reads correctness, with what it needs to run."""


def batch(rewards, **columns):
    n = len(rewards)
    return RolloutBatch(
        {
            "rewards": torch.tensor(rewards, dtype=torch.float64),
            "group": torch.zeros(n, dtype=torch.int64),
            "response_mask": torch.ones(n, 3, dtype=torch.bool),
            "finished": torch.ones(n, dtype=torch.bool),
            "predicted": torch.zeros(n, dtype=torch.float64),
            "target": torch.ones(n, dtype=torch.float64),
            "budget": torch.full((n,), 2.0, dtype=torch.float64),
            "prompt_key": ["p"] * n,
            "meds_features": [None] * n,
            **columns,
        }
    )


def judged_by_the_host(rewards):
    return batch(rewards, correct=torch.tensor(rewards) > 0.5)


@pytest.mark.parametrize("name", PARAMETERS)
def test_a_threshold_beside_the_hosts_own_judgement_is_refused(name):
    part = create("reward", name, **PARAMETERS[name], success_threshold=0.8)
    part(batch([0.7, 1.0]))
    part(batch([0.7, 1.0], correct=torch.tensor([0.7, 1.0])))  # graded by someone's verifier
    with pytest.raises(ConfigError, match=f"reward {name}.success_threshold=0.8 .* rlx.success_threshold"):
        part(judged_by_the_host([0.7, 1.0]))


@pytest.mark.parametrize("name", PARAMETERS)
def test_rows_without_a_reward_are_unscorable_although_the_host_judged_them(name):
    part = create("reward", name, **PARAMETERS[name])
    judged, plain = part(judged_by_the_host([1.0, math.nan, 0.0])), part(batch([1.0, math.nan, 0.0]))
    assert judged["rewards"].isnan().tolist() == [False, True, False]
    assert judged["rewards"].dtype == torch.float64
    torch.testing.assert_close(judged["rewards"], plain["rewards"], equal_nan=True, rtol=0, atol=0)


def test_the_success_rate_is_over_rows_with_a_reward():
    rate = create("reward", "alp")(judged_by_the_host([1.0, math.nan, 0.0]))["solve_rate"]
    assert rate.tolist() == [0.5] * 3
