"""The averaged policy behind `logp_prox`: every training worker averages the weights it holds.

The functions of this file run in the workers (Ray's `__ray_call__`); `everywhere` calls one in all of them. The average
moves after every optimizer step, by the optimizer's own hook, and stands in the model's place for one forward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import ray
import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from ...core.errors import ConfigError
from ...corrections.ppo_ewma import ProximalAverage
from ..checkpoint import write_whole

AVERAGE, ASIDE = "rlx_average", "rlx_weights_aside"
"""Attributes of verl's actor worker: the average, and the trained weights while the average is in their place."""


def everywhere(group: Any, function: Callable[..., Any], *arguments: Any) -> None:
    """Call `function(worker, *arguments)` in all workers of a group and wait for them."""
    ray.get([worker.__ray_call__.remote(function, *arguments) for worker in group.workers])


def start(worker: Any, decay: float) -> None:
    """Keep an average from now on; it is the weights of now."""
    actor = actor_of(worker)
    average = ProximalAverage(decay, local_weights(actor))
    setattr(actor, AVERAGE, average)
    actor.actor.engine.optimizer.register_step_post_hook(lambda *_: average.update(local_weights(actor)))


def start_anew(worker: Any) -> None:
    """The average is the weights of now."""
    actor = actor_of(worker)
    getattr(actor, AVERAGE).reset(local_weights(actor))


@torch.no_grad()
def put_in_place(worker: Any) -> None:
    """Give the model the averaged weights, until `put_back`."""
    actor = actor_of(worker)
    lend(actor, getattr(actor, AVERAGE).mean)


@torch.no_grad()
def lend(actor: Any, weights: Sequence[Tensor]) -> None:
    """Give the model other weights, until `put_back`."""
    own = local_weights(actor)
    setattr(actor, ASIDE, [w.clone() for w in own])
    for w, other in zip(own, weights, strict=True):
        w.copy_(other)


@torch.no_grad()
def put_back(worker: Any) -> None:
    """Give the model the trained weights again."""
    actor = actor_of(worker)
    for w, own in zip(local_weights(actor), getattr(actor, ASIDE)):
        w.copy_(own)
    delattr(actor, ASIDE)


def save(worker: Any, folder: str) -> None:
    """Write this worker's share of the average beside verl's checkpoint."""
    write_whole(getattr(actor_of(worker), AVERAGE).state_dict(), _file(folder))


def load(worker: Any, folder: str) -> None:
    """Restore this worker's share; refuses a checkpoint without one."""
    path, actor = _file(folder), actor_of(worker)
    if not path.exists():
        raise ConfigError(f"{folder} has no {path.name}: it was written without rlx.prox_decay, or on other ranks")
    saved, weights = torch.load(path, map_location="cpu", weights_only=True), local_weights(actor)
    if [w.shape for w in saved["mean"]] != [w.shape for w in weights]:
        raise ConfigError(f"{path} holds the average of other weights than those trained here")
    mean = [m.to(w.device) for m, w in zip(saved["mean"], weights)]
    getattr(actor, AVERAGE).load_state_dict({"z": saved["z"], "mean": mean})


def _file(folder: str) -> Path:
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    return Path(folder) / f"rlx_averaged_policy_{rank}_of_{size}.pt"


def actor_of(worker: Any) -> Any:
    """verl's actor worker among those that share a process."""
    return next(w for w in worker.worker_dict.values() if getattr(w, "actor", None) is not None)


def local_weights(actor: Any) -> list[Tensor]:
    """The trained weights this rank holds, where the average is; what a forward pass had gathered is let go first."""
    module = actor.actor.engine.module
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()
    local = [p.detach() for p in module.parameters() if p.requires_grad]
    return [p.to_local() if hasattr(p, "to_local") else p for p in local]
