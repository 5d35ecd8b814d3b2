"""Weights of earlier policy versions in the training workers, and the log-probs of stale tokens made with them."""

from __future__ import annotations

import pytest
import torch

import rlx_plugins as rlx
from rlx_plugins.hosts.verl import averaged, snapshots


def test_a_kept_version_takes_the_models_place_for_a_while(worker):
    outputs = {}
    for version in range(3):
        outputs[version] = worker.output()
        snapshots.store(worker, version, keep=2)
        worker.train()
    now = worker.output()
    for version in (1, 2):
        snapshots.put_in_place(worker, version)
        assert torch.equal(worker.output(), outputs[version]) and not torch.equal(outputs[version], now)
        averaged.put_back(worker)
        assert torch.equal(worker.output(), now)
    with pytest.raises(KeyError):
        snapshots.put_in_place(worker, 0)


@pytest.fixture
def scored(monkeypatch):
    """Workers whose log-prob of every token is the version in place, negative; remembers what they were told."""
    calls, in_place = [], []

    def everywhere(group, function, *arguments):
        calls.append((function.__name__, *arguments))
        if function is snapshots.put_in_place:
            in_place.append(arguments[0])
        if function is averaged.put_back:
            in_place.clear()

    def worker_forward(trainer, batch, field, asked):
        assert field == "log_probs"
        return torch.nested.as_nested_tensor(
            [torch.full((n,), -float(in_place[-1])) for n in (1, 3)], layout=torch.jagged
        )

    monkeypatch.setattr(averaged, "everywhere", everywhere)
    monkeypatch.setattr(snapshots, "worker_forward", worker_forward)
    return calls


def test_stale_tokens_get_the_log_probs_of_the_version_that_sampled_them(scored):
    trainer = type("Trainer", (), {"actor_rollout_wg": None})()
    versions = snapshots.Versions(keep=2)
    on = torch.tensor([[True, True, True], [True, False, False]])
    place = torch.tensor([1, 0])
    engine, old = torch.full((2, 3), -0.25), torch.full((2, 3), -9.0)

    def behavior(version, staleness):
        columns = {"staleness": staleness, "response_mask": on, "logp_old": old, "logp_behavior": engine}
        table = rlx.RolloutBatch({**columns, "group": torch.tensor([0, 1])})
        return versions.behavior(trainer, None, table, place, version)

    found, told = behavior(6, torch.zeros(2, 3, dtype=torch.int64))
    assert torch.equal(found[on], old[on]) and told == {"old_logits/missing": 0.0, "old_logits/versions": 1.0}
    assert scored == [("store", 6, 2)]
    found, told = behavior(7, torch.tensor([[2, 1, 0], [1, 0, 0]]))
    assert found[0].tolist() == [-0.25, -6.0, -9.0] and found[1, 0] == -6.0  # version 5 was never stored
    assert told == {"old_logits/missing": 1.0, "old_logits/versions": 2.0}
    assert scored[1:] == [("store", 7, 2), ("put_in_place", 6), ("put_back",)]
