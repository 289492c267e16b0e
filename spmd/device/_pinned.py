"""Pinned host memory: `tensor.pin_memory()`, `DataLoader(pin_memory=True)`.

An accelerator's driver can copy pinned memory asynchronously. jax uploads from any host memory, so pinning only makes a copy in
ordinary memory that reports itself as pinned. Programs that pin memory run and get the same values.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_PINNED = "spmd_pinned"


def kernels() -> dict[str, Callable[..., Any]]:
    """Kernels for CPU tensors by overload name. torch's own kernels need an allocator of the device."""
    return {"_pin_memory": pin_memory, "is_pinned": is_pinned}


def pin_memory(self: torch.Tensor, device: Any = None) -> torch.Tensor:
    """A copy with the same strides that counts as pinned. torch calls it only for tensors that are not pinned."""
    copy = torch.empty_strided(self.shape, self.stride(), dtype=self.dtype).copy_(self)
    setattr(copy.untyped_storage(), _PINNED, True)
    return copy


def is_pinned(self: torch.Tensor, device: Any = None) -> bool:
    """Whether the tensor's storage was created by `pin_memory`."""
    return getattr(self.untyped_storage(), _PINNED, False)
