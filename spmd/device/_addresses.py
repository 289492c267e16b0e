"""`data_ptr()` and `nbytes()` of device storages. The addresses identify storages; no memory is mapped at them.

Libraries recognise shared weights by `data_ptr` (Hugging Face's `save_pretrained`, `torch.export.save`). Every live storage therefore has
a unique address, and a view's address is its storage's plus its offset in bytes. See Note [Addresses of nothing].

    x.data_ptr() == x.untyped_storage().data_ptr()
    x[1:].data_ptr() == x.data_ptr() + x[0].nbytes
"""

from __future__ import annotations

import functools
import math
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch

from spmd.base._errors import SpmdError, called_at, message
from spmd.device._copy import to_host
from spmd.device._storage import Buffer, wrap
from spmd.patches._table import current, replace

# Note [Addresses of nothing]
# Bits 62 and 54 make these addresses ones that no processor maps in user space: they are not canonical on x86-64 (48 and 57 bits),
# nor on arm64, which ignores only the highest byte. A read there, through ctypes for example, faults and never hits other memory.
_BASE = (1 << 62) | (1 << 54)
_ALIGNMENT = 512
_next: list[int] = [_BASE]
_lock = threading.Lock()
_given: weakref.WeakKeyDictionary[Buffer, tuple[int, int]] = weakref.WeakKeyDictionary()  # (address, reserved bytes)


def register() -> None:
    """Patch `data_ptr`, `nbytes`, `size`, `len`, `cpu` and `share_memory_` to support tensors and storages of device 'jax'."""
    replace("torch.Tensor.data_ptr", tensor_address)
    for name in ("nbytes", "size", "__len__"):
        replace(f"torch.UntypedStorage.{name}", num_bytes)
    replace("torch.UntypedStorage.data_ptr", address)
    replace("torch.UntypedStorage.cpu", to_cpu)
    replace("torch.UntypedStorage.is_shared", is_shared)
    for name in ("share_memory_", "_share_fd_cpu_", "_share_filename_cpu_"):  # torch.multiprocessing's queues call the last two
        target = f"torch.UntypedStorage.{name}"
        replace(target, _not_shared(current(target)))


def address(self: torch.UntypedStorage) -> int:
    """`storage.data_ptr()`; zero for an empty storage, as on other devices."""
    buffer = getattr(self, "spmd_buffer", None)
    return _torchs_address(self) if buffer is None else _address_of(buffer)


def tensor_address(self: torch.Tensor) -> int:
    """`tensor.data_ptr()`; zero for a tensor without elements, as on other devices."""
    if self.device.type != "jax":
        return _torchs_tensor_address(self)
    buffer = getattr(self.untyped_storage(), "spmd_buffer", None)
    if buffer is None:  # a fake tensor, for which torch raises
        return _torchs_tensor_address(self)
    return _address_of(buffer) + int(self.storage_offset()) * self.itemsize if self.numel() else 0


def num_bytes(self: torch.UntypedStorage) -> int:
    """`storage.nbytes()`, `.size()`, `len(storage)`."""
    buffer = getattr(self, "spmd_buffer", None)
    return _torchs_num_bytes(self) if buffer is None else _num_bytes_of(buffer)


def to_cpu(self: torch.UntypedStorage) -> torch.UntypedStorage:
    """`storage.cpu()`: a copy of the bytes on the host."""
    buffer = getattr(self, "spmd_buffer", None)
    return _torchs_cpu(self) if buffer is None else to_host(wrap(buffer.get())).untyped_storage()


def _not_shared(torchs_own: Callable[..., Any]) -> Callable[..., Any]:
    """A wrapper that raises for storages of device 'jax'; `torchs_own` shares a storage's memory with other processes."""

    @functools.wraps(torchs_own)
    def share(self: torch.UntypedStorage, *args: Any, **kwargs: Any) -> Any:
        if getattr(self, "spmd_buffer", None) is None:
            return torchs_own(self, *args, **kwargs)
        raise SpmdError(
            message(
                "memory of device 'jax' cannot be shared between processes",
                *called_at(),
                "its arrays belong to the process that created them",
                fix="share the values: tensor.cpu().share_memory_()",
            )
        )

    return share


def is_shared(self: torch.UntypedStorage) -> bool:
    """`storage.is_shared()`."""
    return getattr(self, "spmd_buffer", None) is None and _torchs_is_shared(self)


def _num_bytes_of(buffer: Buffer) -> int:
    return math.prod(buffer.shape) * buffer.dtype.itemsize


def _address_of(buffer: Buffer) -> int:
    size = _num_bytes_of(buffer)
    if size == 0:
        return 0
    with _lock:
        found, kept = _given.get(buffer, (0, 0))
        if size > kept:  # new, or grown by `resize_`
            found = _next[0]
            kept = -(-size // _ALIGNMENT) * _ALIGNMENT
            _next[0] += kept
            _given[buffer] = found, kept
    return found


_torchs_address = torch.UntypedStorage.data_ptr
_torchs_tensor_address = torch.Tensor.data_ptr
_torchs_num_bytes = torch.UntypedStorage.nbytes
_torchs_cpu = torch.UntypedStorage.cpu
_torchs_is_shared = torch.UntypedStorage.is_shared
