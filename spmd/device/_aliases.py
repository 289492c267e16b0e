"""View kernels. They are C++'s own kernels, which compute true sizes, strides and offsets on the shared storage.

A view is therefore only a tensor with other strides, as on every PyTorch device. `is_contiguous`, version counters, autograd's
in-place operations on views and `torch.equal(a.storage, b.storage)` work without further code. `_views` reads the strides back.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

from spmd.base._convert import to_numpy_dtype
from spmd.base._errors import called_at, message
from spmd.base._torch import OpOverload
from spmd.device._storage import META, Buffer, buffer_of, contiguous_stride, strided_alias

_BY_REDISPATCH = (
    "view",
    "_reshape_alias",
    "unfold",
    "view_as_real",
    "view_as_complex",
)


def as_strided(self: torch.Tensor, size: Any, stride: Any, storage_offset: Any = None) -> torch.Tensor:
    """`aten.as_strided`, which every composite view of ATen calls in the end."""
    return strided_alias(self, size, stride, int(self.storage_offset()) if storage_offset is None else storage_offset)


def as_strided_(self: torch.Tensor, size: Any, stride: Any, storage_offset: Any = None) -> torch.Tensor:
    """Change the sizes and strides of `self`; `t_`, `transpose_`, `squeeze_` and the like call this in the end.

    It assigns `.data`, because C++'s own kernels check bounds against the storage's bytes, which this storage does not have.
    """
    self.data = as_strided(self, size, stride, storage_offset)
    Buffer.restrided += 1
    return self


def set_tensor(self: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """`tensor.set_(source)`: take the storage, sizes and strides of `source`."""
    self.data = as_strided(source, source.shape, source.stride())
    Buffer.restrided += 1
    return self


def set_storage(self: torch.Tensor, source: torch.UntypedStorage) -> torch.Tensor:
    """`tensor.set_(storage)`: view the whole storage as one dim."""
    buffer = _buffer_under(source)
    count = math.prod(buffer.shape) * buffer.dtype.itemsize // self.itemsize
    return torch.ops.aten.set_.source_Storage_storage_offset(self, source, 0, (count,), (1,))


def set_window(self: torch.Tensor, source: torch.UntypedStorage, offset: int, size: Any, stride: Any = ()) -> torch.Tensor:
    """`tensor.set_(storage, offset, size, stride)`.

    Raw bytes that are still on the host (from `torch.load`) get the tensor's dtype and shape as a whole. Otherwise every read of a
    tensor whose dtype differs from its storage's would need a bit cast.
    """
    buffer = _buffer_under(source)
    size, host = tuple(size), buffer.host
    is_raw = host is not None and host.dtype == np.uint8 and host.ndim == 1 and host.size % self.itemsize == 0
    if host is not None and is_raw and self.dtype != torch.uint8:
        buffer.host = np.ascontiguousarray(host).view(to_numpy_dtype(self.dtype))
        if math.prod(size) == buffer.host.size and tuple(stride) in ((), contiguous_stride(size)):
            buffer.host = buffer.host.reshape(size)
        buffer.reshape(buffer.host.shape)
    Buffer.restrided += 1
    return _set_window.redispatch(META, self, source, offset, size, stride)


def _buffer_under(source: torch.UntypedStorage) -> Buffer:
    if source.device.type != "jax":
        raise RuntimeError(
            message(
                f"the storage of a tensor on device 'jax' cannot be one on device '{source.device}'",
                *called_at(),
                fix="tensor.set_(source.to('jax')), where `source` is a tensor over that storage",
            )
        )
    return source.spmd_buffer  # pyright: ignore[reportAttributeAccessIssue]


_set_window = torch.ops.aten.set_.source_Storage_storage_offset


def is_set_to(self: torch.Tensor, tensor: torch.Tensor) -> bool:
    """`a.is_set_to(b)`: whether both have the same storage, offset, sizes and strides."""
    same = buffer_of(self) is buffer_of(tensor) and self.storage_offset() == tensor.storage_offset()
    return same and self.shape == tensor.shape and self.stride() == tensor.stride()


def set_empty(self: torch.Tensor) -> torch.Tensor:
    """`tensor.set_()`: make the tensor empty, with a new storage."""
    self.data = torch.empty(0, dtype=self.dtype, device=self.device)
    return self


def view_kernels() -> dict[str, Any]:
    """View kernels by overload name."""
    kernels: dict[str, Any] = {
        "as_strided": as_strided,
        "as_strided_": as_strided_,
        "set_.source_Tensor": set_tensor,
        "set_.source_Storage": set_storage,
        "set_.source_Storage_storage_offset": set_window,
        "set_": set_empty,
        "is_set_to": is_set_to,
    }
    for name in _BY_REDISPATCH:
        packet, _, overload = name.partition(".")
        op = getattr(getattr(torch.ops.aten, packet), overload or "default")
        kernels[name] = _redispatch(op)
    return kernels


def _redispatch(op: OpOverload) -> Any:
    def kernel(*args: Any, **kwargs: Any) -> torch.Tensor:
        return op.redispatch(META, *args, **kwargs)

    return kernel
