"""Numbers of a scored batch, worked out by hand, and the fingerprints of prompts and weights."""

import math

import pytest
import torch
from torch import nn

from rlx_plugins.core.batch import RolloutBatch
from rlx_plugins.hosts.measures import (
    batch_measures,
    checkpoint_hash,
    prompts_hash,
    shares,
    update_tokens,
    weights_hash,
)

NAN = math.nan


def batch(**changes):
    """Three groups of two: all fail, mixed, all pass. Lengths 1, 2, 3, 3, 4, 4."""
    lengths = torch.tensor([1, 2, 3, 3, 4, 4])
    mask = torch.arange(4)[None] < lengths[:, None]
    columns = {
        "group": torch.tensor([0, 0, 1, 1, 2, 2]),
        "rewards": torch.tensor([0.0, 0.25, 0.0, 1.0, 1.0, 1.25], dtype=torch.float64),
        "response_mask": mask,
        "response_ids": torch.tensor(
            [[5, 9, 9, 9], [5, 6, 9, 9], [1, 2, 3, 9], [1, 2, 3, 0], [1, 2, 3, 4], [1, 2, 3, 5]]
        ),
        "advantages": torch.tensor([0.0, 0.0, -1.0, 1.0, 0.0, 0.0])[:, None] * mask,
        "loss_weight": mask.double(),
        "staleness": torch.zeros(6, 4, dtype=torch.int64),
    }
    return RolloutBatch(columns | changes)


def test_groups_without_a_success_and_without_a_failure():
    got = batch_measures(batch())
    assert (got["groups/all_fail"], got["groups/all_pass"]) == pytest.approx((1 / 3, 1 / 3))


def test_the_hosts_own_column_says_what_is_correct():
    correct = torch.tensor([True, True, True, True, False, True])
    got = batch_measures(batch(correct=correct))
    assert (got["groups/all_fail"], got["groups/all_pass"]) == pytest.approx((0, 2 / 3))


def test_groups_of_unscorable_rows_do_not_count():
    rewards = torch.tensor([NAN, NAN, 0.0, NAN, 1.0, 1.0], dtype=torch.float64)
    got = batch_measures(batch(rewards=rewards))
    assert (got["groups/all_fail"], got["groups/all_pass"]) == (0.5, 0.5)


def test_equal_responses_count_once_and_what_is_masked_does_not_tell_them_apart():
    assert batch_measures(batch())["groups/distinct"] == pytest.approx(5 / 6)


def test_tokens_work_that_have_a_weight_and_an_advantage():
    assert batch_measures(batch())["tokens/effective"] == pytest.approx(6 / 17)
    weight = batch().loss_weight.clone()
    weight[2] = 0
    assert batch_measures(batch(loss_weight=weight))["tokens/effective"] == pytest.approx(3 / 17)
    assert update_tokens(batch(loss_weight=weight)) == 14


def test_staleness_is_over_model_tokens():
    staleness = torch.zeros(6, 4, dtype=torch.int64)
    staleness[0] = 3  # one token counts
    got = batch_measures(batch(staleness=staleness))
    assert (got["tokens/stale"], got["staleness/mean"], got["staleness/max"]) == pytest.approx((1 / 17, 3 / 17, 3))
    per_row = torch.tensor([3, 0, 0, 0, 0, 0])
    assert batch_measures(batch(staleness=per_row))["staleness/mean"] == pytest.approx(3 / 17)


def test_the_tail_of_the_lengths():
    assert batch_measures(batch())["length/p99_over_p50"] == pytest.approx(4 / 3, rel=1e-6)


def test_the_mismatch_is_k3_over_known_tokens_of_the_current_policy():
    old = torch.full((6, 4), -1.0, dtype=torch.float64)
    rollout = torch.full((6, 4), NAN, dtype=torch.float64)
    rollout[0, 0], rollout[1, 0] = -1.5, -1.0  # d = 0.5 and 0
    expected = (math.exp(0.5) - 1 - 0.5) / 2
    assert batch_measures(batch(logp_old=old, logp_rollout=rollout))["sampling/kl"] == pytest.approx(expected)
    stale = torch.zeros(6, 4, dtype=torch.int64)
    stale[0] = 1
    assert batch_measures(batch(logp_old=old, logp_rollout=rollout, staleness=stale))["sampling/kl"] == 0
    unknown = torch.full((6, 4), NAN, dtype=torch.float64)
    assert "sampling/kl" not in batch_measures(batch(logp_old=old, logp_rollout=unknown))


def test_padding_changes_nothing():
    b = batch()
    wider = {
        name: torch.cat([column, torch.full_like(column[:, :3], 7 if column.dtype == torch.int64 else 0)], 1)
        for name, column in b.items()
        if isinstance(column, torch.Tensor) and column.ndim == 2
    }
    assert batch_measures(b.with_columns(**wider)) == pytest.approx(batch_measures(b))


def test_shares_of_values():
    assert shares(["b", "a", "b", None]) == {"None": 0.25, "a": 0.25, "b": 0.5}


def test_the_hash_of_prompts_is_that_of_their_set():
    one = prompts_hash([[1, 2], [3], [1, 2]])
    assert one == prompts_hash(iter([(3,), (1, 2)]))
    assert one != prompts_hash([[1, 2], [4]])
    assert prompts_hash([[12]]) != prompts_hash([[1], [2]])
    assert 0 <= one < 2**48


def test_the_hash_of_weights_changes_with_a_weight_its_name_and_its_shape():
    def model(seed=0, out=3):
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(4, out), nn.Linear(out, 2))

    assert weights_hash(model()) == weights_hash(model())
    assert weights_hash(model()) != weights_hash(model(seed=1))
    assert weights_hash(model()) != weights_hash(nn.Sequential(*model(), nn.Identity(), nn.Linear(1, 1)))
    empty = nn.Module()
    empty.register_parameter("x", nn.Parameter(torch.empty(0)))
    assert len(weights_hash(empty)) == 16


def test_a_checkpoint_is_recognised_by_its_weights_on_disk(tmp_path):
    assert checkpoint_hash(tmp_path) is None
    weights = bytearray(range(256)) * 1000
    found = []
    for change in (None, 0, 252_100):
        if change is not None:
            weights[change] ^= 1
        (tmp_path / "model.safetensors").write_bytes(weights)
        found.append(checkpoint_hash(tmp_path))
        assert found[-1] == checkpoint_hash(tmp_path)
    assert len(set(found)) == 3
