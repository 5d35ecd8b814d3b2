"""The averaged policy in a training worker: FSDP2 shards on one rank, moved by the optimizer's own hook."""

from __future__ import annotations

import pytest
import torch

import rlx_plugins as rlx
from rlx_plugins.hosts.verl import averaged

DECAY = 0.75


def average(worker):
    return worker.worker_dict["actor_rollout"].rlx_average


def test_it_follows_every_optimizer_step_and_takes_the_models_place_for_a_while(worker):
    averaged.start(worker, DECAY)
    seen = [worker.weights(), worker.train(), worker.train()]
    trained = worker.output()
    averaged.put_in_place(worker)
    total = sum(DECAY**k for k in range(3))
    for i, found in enumerate(worker.weights()):
        torch.testing.assert_close(found, sum(DECAY ** (2 - k) * w[i] for k, w in enumerate(seen)) / total)
    assert not torch.allclose(worker.output(), trained)
    averaged.put_back(worker)
    assert torch.equal(worker.output(), trained)
    averaged.start_anew(worker)
    assert average(worker).z == 1.0
    averaged.put_in_place(worker)
    assert torch.equal(worker.output(), trained)


def test_its_share_is_in_the_checkpoint(worker, tmp_path):
    averaged.start(worker, DECAY)
    worker.train()
    worker.train()
    kept = average(worker).state_dict()
    averaged.save(worker, str(tmp_path))
    averaged.start_anew(worker)
    averaged.load(worker, str(tmp_path))
    assert average(worker).z == kept["z"] and all(map(torch.equal, average(worker).mean, kept["mean"]))
    with pytest.raises(rlx.ConfigError, match="written without rlx.prox_decay, or on other ranks"):
        averaged.load(worker, str(tmp_path / "elsewhere"))
    torch.save({"z": 1.0, "mean": [torch.zeros(5)]}, tmp_path / "rlx_averaged_policy_0_of_1.pt")
    with pytest.raises(rlx.ConfigError, match="the average of other weights"):
        averaged.load(worker, str(tmp_path))
