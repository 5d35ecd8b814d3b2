"""The averaged policy behind `logp_prox`: a bias-corrected moving average of the trained weights."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import DistributedType
from torch import Tensor, nn
from trl.models.utils import disable_gradient_checkpointing

from ...core.errors import ConfigError
from ...corrections.ppo_ewma import ProximalAverage
from .checkpoint import write_whole

if TYPE_CHECKING:
    from .trainer import RLXTrainer

FILE = "rlx_averaged_policy.pt"


class AveragedPolicy:
    """`ProximalAverage` of the trained weights, moved after every optimizer step; starts as the initial policy.

    Every rank keeps the trained weights once more, in float32 at least, so it is refused where weights are sharded.
    """

    def __init__(self, trainer: RLXTrainer, decay: float):
        if trainer.accelerator.distributed_type in (DistributedType.DEEPSPEED, DistributedType.FSDP):
            raise ConfigError("prox_decay: every rank averages whole weights, which DeepSpeed and FSDP divide")
        self.trainer = trainer
        self.average = ProximalAverage(decay, list(self._weights().values()))

    def _weights(self) -> dict[str, nn.Parameter]:
        return {name: p for name, p in self.trainer.model.named_parameters() if p.requires_grad}

    @property
    def mean(self) -> dict[str, Tensor]:
        """The averaged weights by name."""
        return dict(zip(self._weights(), self.average.mean))

    def stepped(self, *, reset: bool) -> None:
        """After an optimizer step: the average moves, or starts anew at the weights of now."""
        (self.average.reset if reset else self.average.update)(list(self._weights().values()))

    @torch.no_grad()
    def logp(self, inputs: Mapping[str, Any]) -> Tensor:
        """[B,T] log-probabilities of the response tokens under the averaged weights."""
        trainer, args = self.trainer, self.trainer.args
        with self._in_place(), disable_gradient_checkpointing(trainer.model, args.gradient_checkpointing_kwargs):
            logp, _, _ = trainer._get_per_token_logps_and_entropies(
                trainer.model,
                torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1),
                torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1),
                inputs["completion_ids"].shape[1],
                batch_size=args.per_device_train_batch_size,
            )
        return logp

    @contextmanager
    def _in_place(self) -> Iterator[None]:
        """The model with the averaged weights."""
        weights = list(self._weights().values())
        current = [p.detach().clone() for p in weights]
        try:
            for p, mean in zip(weights, self.average.mean):
                p.copy_(mean)
            yield
        finally:
            for p, own in zip(weights, current):
                p.copy_(own)

    def save(self, folder: str) -> None:
        """Write the average beside the trainer's checkpoint."""
        mean = {name: w.cpu() for name, w in self.mean.items()}
        write_whole({"z": self.average.z, "mean": mean}, Path(folder) / FILE)

    def load(self, folder: str) -> None:
        """Restore the average; refuses a checkpoint without one, or with that of other weights."""
        path = os.path.join(folder, FILE)
        if not os.path.exists(path):
            raise ConfigError(f"{folder} has no {FILE}: it was written without prox_decay")
        saved, weights = torch.load(path, map_location="cpu", weights_only=True), self._weights()
        if set(saved["mean"]) != set(weights):
            raise ConfigError(f"{path} holds the average of other weights than those trained here")
        mean = [saved["mean"][name].to(p.device) for name, p in weights.items()]
        self.average.load_state_dict({"z": saved["z"], "mean": mean})
