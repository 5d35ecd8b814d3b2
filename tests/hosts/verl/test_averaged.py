"""The averaged policy in a training worker: FSDP2 shards on one rank, moved by the optimizer's own hook."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import distributed, nn
from torch.distributed.fsdp import fully_shard

import rlx_plugins as rlx
from rlx_plugins.hosts.verl import averaged

DECAY = 0.75


@pytest.fixture
def group():
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield distributed.device_mesh.init_device_mesh("cpu", (1,))
    distributed.destroy_process_group()


@pytest.fixture
def worker(group):
    """A process with verl's actor and another worker; `worker.train()` makes one optimizer step."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 4, bias=False), nn.Linear(4, 2))
    module[0].requires_grad_(False)
    for layer in module:
        fully_shard(layer, mesh=group)
    fully_shard(module, mesh=group)
    optimizer = torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=0.5)
    actor = SimpleNamespace(actor=SimpleNamespace(engine=SimpleNamespace(module=module, optimizer=optimizer)))
    made = SimpleNamespace(worker_dict={"critic": SimpleNamespace(), "actor_rollout": actor}, module=module)

    def train():
        optimizer.zero_grad()
        module(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        return weights(made)

    made.train = train
    return made


def weights(worker):
    return [p.detach().full_tensor().clone() for p in worker.module.parameters() if p.requires_grad]


def average(worker):
    return worker.worker_dict["actor_rollout"].rlx_average


def output(worker):
    with torch.no_grad():
        return worker.module(torch.ones(1, 3))


def test_it_follows_every_optimizer_step_and_takes_the_models_place_for_a_while(worker):
    averaged.start(worker, DECAY)
    seen = [weights(worker), worker.train(), worker.train()]
    trained = output(worker)
    averaged.put_in_place(worker)
    total = sum(DECAY**k for k in range(3))
    for i, found in enumerate(weights(worker)):
        torch.testing.assert_close(found, sum(DECAY ** (2 - k) * w[i] for k, w in enumerate(seen)) / total)
    assert not torch.allclose(output(worker), trained)
    averaged.put_back(worker)
    assert torch.equal(output(worker), trained)
    averaged.start_anew(worker)
    assert average(worker).z == 1.0
    averaged.put_in_place(worker)
    assert torch.equal(output(worker), trained)


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
