"""What verl 0.9 and vLLM's CPU build need without an accelerator, each with the failure it avoids.

Nothing here takes effect unless ``VERL_PLATFORM=cpu``. What can be said in verl's configuration or in the environment
is said there (``settings``); this file holds the rest:

in every verl process (``activate``)
    a platform named ``cpu``        verl knows only accelerators and would call ``torch.cuda``
    one backend per device type     verl asks torch for "cpu:gloo,<device>:<backend>"; with the device "cpu" torch
                                    refuses the duplicate
    offloading without pinning      verl always offloads the reference model into pinned memory, and pinning memory
                                    needs an accelerator
    TRL counts as absent            verl builds every model with a class that TRL has dropped: beside TRL 1.16 no
                                    training process would start, and the tests have both in one environment
    critics without flash attention verl loads every critic with it, whatever its configuration says, and it needs an
                                    accelerator
    the replica ``rlx_hf``          adapters, unlike replicas, have no public registration
in every vLLM process (``keep_weights``, an entry point of group ``vllm.general_plugins``)
    weights stay parameters         vLLM's CPU build packs linear weights for its kernels and drops the originals: the
                                    next synchronisation would find parameters of size 0
"""

from __future__ import annotations

import functools
import os
from typing import Any

__all__ = ["PLATFORM", "activate", "is_chosen", "keep_weights"]

PLATFORM = "cpu"
ROLLOUT_NAME = "rlx_hf"


def is_chosen() -> bool:
    """Whether the environment chooses the CPU platform."""
    return os.environ.get("VERL_PLATFORM", "").strip().lower() == PLATFORM


def activate() -> bool:
    """Makes this process one of a CPU run if the environment chooses it; says whether it did.

    To be called while ``verl`` is imported, before anything asks verl for its platform. Calling it again is harmless.
    """
    if not is_chosen():
        return False
    _register_platform()
    _allow_one_backend_per_device()
    _offload_without_pinning()
    _leave_trl_alone()
    _load_critics_without_flash_attention()
    _register_replica()
    return True


def _register_platform() -> None:
    from verl.plugin.platform import PlatformRegistry, set_platform

    from .device import CpuPlatform

    if PlatformRegistry.get(PLATFORM) is not CpuPlatform:
        PlatformRegistry.register(platform=PLATFORM)(CpuPlatform)
        set_platform(CpuPlatform())


def _allow_one_backend_per_device() -> None:
    import torch.distributed as distributed

    original = distributed.init_process_group
    if hasattr(original, "__rlx_original__"):
        return

    @functools.wraps(original)
    def init_process_group(backend: str | None = None, *args: Any, **kwargs: Any) -> None:
        if isinstance(backend, str) and "," in backend:
            backend = ",".join(dict.fromkeys(backend.split(",")))
        original(backend, *args, **kwargs)

    init_process_group.__rlx_original__ = original  # type: ignore[attr-defined]
    distributed.init_process_group = init_process_group


def _offload_without_pinning() -> None:
    import torch.distributed.fsdp as fsdp

    if issubclass(fsdp.CPUOffloadPolicy, _Unpinned):
        return

    class UnpinnedCPUOffloadPolicy(_Unpinned, fsdp.CPUOffloadPolicy):  # type: ignore[misc, name-defined]
        def __init__(self, pin_memory: bool = False):
            super().__init__(pin_memory=False)

    fsdp.CPUOffloadPolicy = UnpinnedCPUOffloadPolicy  # type: ignore[misc]


class _Unpinned:
    """Marks the replacement of torch's offload policy."""


def _leave_trl_alone() -> None:
    from verl.utils import import_utils

    import_utils.is_trl_available = lambda: False


def _load_critics_without_flash_attention() -> None:
    from verl.utils import model

    def load_valuehead_model(local_path: str, torch_dtype: Any, model_config: Any, trust_remote_code: bool) -> Any:
        from transformers import AutoModelForTokenClassification

        return AutoModelForTokenClassification.from_pretrained(
            local_path, dtype=torch_dtype, config=model_config, trust_remote_code=trust_remote_code
        )

    model.load_valuehead_model = load_valuehead_model


def _register_replica() -> None:
    from verl.workers.rollout import base
    from verl.workers.rollout.replica import RolloutReplicaRegistry

    replica = f"{__package__}.replica"

    def load() -> type:
        from .replica import TransformersReplica

        return TransformersReplica

    RolloutReplicaRegistry.register(ROLLOUT_NAME, load)
    base._ROLLOUT_REGISTRY[(ROLLOUT_NAME, "async")] = f"{replica}.TransformersAdapter"


def keep_weights() -> None:
    """Lets vLLM's CPU build compute its linear layers from the parameters themselves, so that they can be replaced."""
    if not is_chosen():
        return
    import torch
    from vllm.model_executor.layers import utils
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return

    original = utils.dispatch_cpu_unquantized_gemm

    def linear_from_parameter(layer: torch.nn.Module, remove_weight: bool) -> None:
        if layer.weight.ndim == 2:
            layer.cpu_linear = torch.nn.functional.linear
        else:  # a convolution, packed in place
            original(layer, remove_weight)

    utils.dispatch_cpu_unquantized_gemm = linear_from_parameter
