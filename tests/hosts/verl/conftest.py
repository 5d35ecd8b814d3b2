from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import distributed, nn
from torch.distributed.fsdp import fully_shard

import rlx_plugins as rlx
from rlx_plugins.core.registry import forget

pytest.importorskip("verl", reason="verl is not installed")
sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture
def registered():
    """`@registered(kind, name)`: as `rlx.register` above a plain class, undone after the test."""
    from dataclasses import dataclass

    names = []

    def register(kind, name):
        def decorate(cls):
            names.append((kind, name))
            return rlx.register(kind, name)(dataclass(cls))

        return decorate

    yield register
    for kind, name in names:
        forget(kind, name)


@pytest.fixture
def group():
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield distributed.device_mesh.init_device_mesh("cpu", (1,))
    distributed.destroy_process_group()


@pytest.fixture
def worker(group):
    """A process with verl's actor (two layers, the first frozen) and another worker.

    `train()` makes one optimizer step and returns the trained weights, `weights()`; `output()` is the model's answer.
    """
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 4, bias=False), nn.Linear(4, 2))
    module[0].requires_grad_(False)
    for layer in module:
        fully_shard(layer, mesh=group)
    fully_shard(module, mesh=group)
    optimizer = torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=0.5)
    actor = SimpleNamespace(actor=SimpleNamespace(engine=SimpleNamespace(module=module, optimizer=optimizer)))
    made = SimpleNamespace(worker_dict={"critic": SimpleNamespace(), "actor_rollout": actor}, module=module)

    def weights():
        return [p.detach().full_tensor().clone() for p in module.parameters() if p.requires_grad]

    def train():
        optimizer.zero_grad()
        module(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        return weights()

    def output():
        with torch.no_grad():
            return module(torch.ones(1, 3))

    made.train, made.weights, made.output = train, weights, output
    return made
