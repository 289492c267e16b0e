"""View kernels: C++'s own, which compute true sizes, strides and offsets on the shared storage.

A view is therefore nothing but a tensor with other strides, as everywhere in PyTorch: `is_contiguous`, version counters,
autograd's in-place-on-a-view and `torch.equal(a.storage, b.storage)` hold by themselves. `_views` reads the strides back.
"""

from __future__ import annotations

from typing import Any

import torch

from spmd.device._storage import META, strided_alias

_BY_REDISPATCH = (
    "view",
    "_reshape_alias",
    "unfold",
    "view_as_real",
    "view_as_complex",
    "set_.source_Storage_storage_offset",
    "set_.source_Tensor",
    "set_",
)


def as_strided(self: torch.Tensor, size: Any, stride: Any, storage_offset: Any = None) -> torch.Tensor:
    """The view that every composite view of ATen ends in."""
    return strided_alias(self, size, stride, self.storage_offset() if storage_offset is None else storage_offset)


def view_kernels() -> dict[str, Any]:
    """Kernel by overload name."""
    kernels: dict[str, Any] = {"as_strided": as_strided}
    for name in _BY_REDISPATCH:
        packet, _, overload = name.partition(".")
        op = getattr(getattr(torch.ops.aten, packet), overload or "default")
        kernels[name] = _redispatch(op)
    return kernels


def _redispatch(op: torch._ops.OpOverload) -> Any:
    def kernel(*args: Any, **kwargs: Any) -> torch.Tensor:
        return op.redispatch(META, *args, **kwargs)

    return kernel
