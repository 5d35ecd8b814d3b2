"""The averaged policy behind `logp_prox`: a moving average of the trained weights."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import DistributedType
from torch import Tensor

from ...core.errors import ConfigError
from .checkpoint import write_whole

if TYPE_CHECKING:
    from .trainer import RLXTrainer

FILE = "rlx_averaged_policy.pt"


class AveragedPolicy:
    """mean <- decay * mean + (1 - decay) * weights after every optimizer step; starts as the initial policy.

    Every rank keeps the trained weights once more, so it is refused where weights are sharded.
    """

    def __init__(self, trainer: RLXTrainer, decay: float):
        if trainer.accelerator.distributed_type in (DistributedType.DEEPSPEED, DistributedType.FSDP):
            raise ConfigError("prox_decay: every rank averages whole weights, which DeepSpeed and FSDP divide")
        self.trainer, self.decay = trainer, decay
        self.mean = {name: p.detach().clone() for name, p in self._weights()}

    def _weights(self) -> Iterator[tuple[str, Tensor]]:
        return ((name, p) for name, p in self.trainer.model.named_parameters() if p.requires_grad)

    @torch.no_grad()
    def update(self) -> None:
        """After an optimizer step."""
        for name, p in self._weights():
            self.mean[name].lerp_(p.to(self.mean[name].device), 1 - self.decay)

    @torch.no_grad()
    def logp(self, inputs: Mapping[str, Any]) -> Tensor:
        """[B,T] log-probabilities of the response tokens under the averaged weights."""
        with self._in_place():
            logp, _, _ = self.trainer._get_per_token_logps_and_entropies(
                self.trainer.model,
                torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1),
                torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1),
                inputs["completion_ids"].shape[1],
                batch_size=self.trainer.args.per_device_train_batch_size,
            )
        return logp

    @contextmanager
    def _in_place(self) -> Iterator[None]:
        """The model with the averaged weights."""
        current = {name: p.detach().clone() for name, p in self._weights()}
        try:
            for name, p in self._weights():
                p.copy_(self.mean[name])
            yield
        finally:
            for name, p in self._weights():
                p.copy_(current[name])

    def save(self, folder: str) -> None:
        """Write the mean beside the trainer's checkpoint."""
        write_whole({name: w.cpu() for name, w in self.mean.items()}, Path(folder) / FILE)

    def load(self, folder: str) -> None:
        """Restore the mean; refuses a checkpoint without one."""
        path = os.path.join(folder, FILE)
        if not os.path.exists(path):
            raise ConfigError(f"{folder} has no {FILE}: it was written without prox_decay")
        saved = torch.load(path, map_location="cpu", weights_only=True)
        for name, p in self._weights():
            self.mean[name] = saved[name].to(p.device)
