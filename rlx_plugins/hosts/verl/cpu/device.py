"""The CPU as a platform of verl."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Iterator
from typing import Any

import psutil
import torch
from verl.plugin.platform import PlatformBase

__all__ = ["CpuPlatform"]


class _CpuModule(types.ModuleType):
    """``torch.cpu`` with what verl also calls on ``torch.cuda``; memory is that of the process and of the machine."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name)

    def is_available(self) -> bool:
        return True

    def current_device(self) -> str:
        return "cpu"

    def device_count(self) -> int:
        return 1

    def get_device_name(self, *device: Any) -> str:
        return "CPU"

    def nothing(self, *args: Any, **kwargs: Any) -> None:
        """For calls that have no counterpart here."""

    set_device = synchronize = empty_cache = ipc_collect = nothing
    reset_peak_memory_stats = set_per_process_memory_fraction = nothing

    def memory_allocated(self, *device: Any) -> int:
        return psutil.Process().memory_info().rss

    max_memory_allocated = memory_reserved = max_memory_reserved = memory_allocated

    def mem_get_info(self, *device: Any) -> tuple[int, int]:
        memory = psutil.virtual_memory()
        return memory.available, memory.total

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    manual_seed_all = manual_seed

    def get_rng_state(self, *device: Any) -> torch.Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: torch.Tensor, *device: Any) -> None:
        torch.set_rng_state(state)


class CpuPlatform(PlatformBase):
    """One device, the CPU.

    Its Ray resource is called ``GPU`` because verl counts only GPUs and NPUs when it checks a cluster, and Ray accepts
    any number of them in ``ray.init``. Without inter-process handles verl sends weights through shared memory.
    """

    device_name = "cpu"
    vendor_name = "generic"
    device_module = _CpuModule("rlx_cpu_device")

    def is_available(self) -> bool:
        return True

    def current_device(self) -> str:  # type: ignore[override]
        return "cpu"  # an index would mean a CUDA device in `tensor.to(index)`

    def device_count(self) -> int:
        return 1

    def set_device(self, device_index: int) -> None:
        pass

    def synchronize(self, device_index: int | None = None) -> None:
        pass

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        torch.manual_seed(seed)

    def set_allocator_settings(self, settings: str) -> None:
        pass

    def empty_cache(self) -> None:
        pass

    def get_device_capability(self, device_index: int = 0) -> tuple[int | None, int | None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"

    @contextlib.contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        yield

    def profiler_start(self) -> None:
        pass

    def profiler_stop(self) -> None:
        pass

    def ray_resource_name(self) -> str:
        return "GPU"

    def ray_noset_envvars(self) -> list[str]:
        return []

    def is_ipc_supported(self) -> bool:
        return False

    def rollout_env_vars(self) -> dict[str, str]:
        return {}

    def cudart(self) -> None:
        return None
