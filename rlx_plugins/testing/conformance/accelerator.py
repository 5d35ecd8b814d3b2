"""An accelerator pretended on the CPU: its tensors say they live elsewhere, and every wait for them is written down.

A tensor that a plug-in makes without saying on which device meets the batch's tensors here as it would on a GPU, with
an error; reading a number, a shape that depends on values, and copies between the devices are listed with the line that
asked for them. Results are those of the CPU.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

DEVICE = torch.device("meta")
"""What the tensors say: the one device that needs no driver and that autograd serves on the calling thread."""

HOST = torch.device("cpu")

WAITS = {
    "_local_scalar_dense": "a value is read: .item(), float(), int(), bool() or `if` on a tensor",
    "nonzero": "the shape depends on values: nonzero() or indexing by a mask",
    "masked_select": "the shape depends on values: masked_select()",
    "_unique2": "the shape depends on values: unique()",
    "unique_dim": "the shape depends on values: unique()",
    "unique_consecutive": "the shape depends on values: unique_consecutive()",
    "bincount": "the shape depends on values: bincount()",
    "equal": "a value is read: torch.equal()",
}
"""Operation -> why it makes the host wait for the device."""

MAKES_FROM_DATA = {torch.tensor, torch.as_tensor, torch.asarray, Tensor.new_tensor}


class Remote(Tensor):
    """A CPU tensor, `local`, that says it is on `DEVICE`."""

    local: Tensor

    @staticmethod
    def __new__(cls, local: Tensor) -> Remote:
        remote = Tensor._make_wrapper_subclass(
            cls,
            local.size(),
            strides=local.stride(),
            storage_offset=local.storage_offset(),
            dtype=local.dtype,
            device=DEVICE,
        )
        remote.local = local
        return remote

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        return _execute(func, args, kwargs or {}, [])


@contextmanager
def accelerator() -> Iterator[list[str]]:
    """Inside, what is computed on columns that were `put` there runs as if on a GPU; the list collects the waits."""
    waits: list[str] = []
    with _Operations(waits), _Functions(waits):
        yield waits


def put(columns: Mapping[str, Any]) -> dict[str, Any]:
    """The columns with their tensors on the accelerator."""
    return {name: Remote(value) if isinstance(value, Tensor) else value for name, value in columns.items()}


def fetched(value: Any) -> Any:
    """A structure of tensors on the accelerator as one of CPU tensors."""
    return tree_map(lambda x: x.local if isinstance(x, Remote) else x, value)


class _Operations(TorchDispatchMode):
    """Carries out every operation on the CPU and wraps what would live on the accelerator."""

    def __init__(self, waits: list[str]) -> None:
        super().__init__()
        self.waits = waits

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        return _execute(func, args, kwargs or {}, self.waits)


class _Functions(TorchFunctionMode):
    """Calls of the Python interface that never reach an operation."""

    def __init__(self, waits: list[str]) -> None:
        super().__init__()
        self.waits = waits

    def __torch_function__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is Tensor.tolist and isinstance(args[0], Remote):
            self.waits.append(f"values are read: tolist() ({_asked_by()})")
            return args[0].local.tolist()
        if func is Tensor.numpy and isinstance(args[0], Remote):
            raise TypeError("can't convert a tensor on an accelerator to numpy; use tensor.cpu() first")
        if func in MAKES_FROM_DATA:
            return self._from_data(func, args, kwargs)
        return func(*args, **kwargs)

    def _from_data(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        if func is Tensor.new_tensor:
            func, args, kwargs = torch.tensor, args[1:], {"device": args[0].device, "dtype": args[0].dtype} | kwargs
        elif isinstance(args[0], Tensor):
            device, dtype = kwargs.get("device") or args[0].device, kwargs.get("dtype") or args[0].dtype
            return args[0].to(device=device, dtype=dtype)
        device = torch.device(kwargs.pop("device", None) or HOST)
        made = func(*args, **kwargs)
        if device != DEVICE:
            return made.to(device)
        self.waits.append(f"numbers are copied to the device: torch.tensor(..., device=...) ({_asked_by()})")
        return Remote(made)


def _execute(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], waits: list[str]) -> Any:
    leaves = tree_leaves((args, kwargs))
    remote = [x for x in leaves if isinstance(x, Remote)]
    local = [x for x in leaves if isinstance(x, Tensor) and not isinstance(x, Remote)]
    name = func.overloadpacket.__name__
    target = kwargs.get("device")
    indexes = name in ("index", "_index_put_impl_", "index_put", "index_put_")
    if remote and any(x.ndim for x in local) and name not in ("copy_", "_to_copy") and not indexes:
        raise RuntimeError(
            f"{name}: expected all tensors to be on the same device, but one was made on the CPU and the batch is on an"
            " accelerator; make it with device=batch.device"
        )
    if remote and (why := _why_it_waits(name, args, remote, local, target)):
        waits.append(f"{why} ({_asked_by()})")
    here = {"device": HOST} if target is not None else {}
    out = func(*fetched(args), **{**fetched(dict(kwargs)), **here})
    on_device = torch.device(target) == DEVICE if target is not None else bool(remote)
    if name.endswith("_") and not name.startswith("_"):
        return args[0]
    if not on_device:
        return out
    return tree_map(lambda x: Remote(x) if isinstance(x, Tensor) else x, out)


def _why_it_waits(name: str, args: Sequence[Any], remote: list[Any], local: list[Tensor], target: Any) -> str | None:
    if name in WAITS:
        return WAITS[name]
    if target is not None and torch.device(target) != DEVICE:
        return "a tensor is copied to the CPU: .cpu() or .to()"
    if name == "index" and any(x is not None and x.dtype == torch.bool for x in args[1]):
        return WAITS["nonzero"]
    if name == "repeat_interleave":
        return "the shape depends on values: repeat_interleave() with a tensor"
    if name == "copy_" and local:
        return "a tensor is copied between CPU and device: copy_()"
    if any(x.ndim for x in local):
        return "indices are copied from the CPU: indexing by a list or a CPU tensor"
    return None


def _asked_by() -> str:
    """The innermost line outside torch and this file, as "file.py:12"."""
    here, library = Path(__file__).name, str(Path(torch.__file__).parent)
    for frame in reversed(traceback.extract_stack()):
        if not frame.filename.startswith(library) and Path(frame.filename).name != here:
            return f"{Path(frame.filename).name}:{frame.lineno}"
    return "unknown"
