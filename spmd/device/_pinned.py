"""Pinned host memory: `tensor.pin_memory()`, `DataLoader(pin_memory=True)`.

An accelerator's driver copies pinned memory without the host's help. jax uploads from any host memory, so pinning is a copy in
ordinary memory that says it is pinned: programs that pin run, and get the same values, whether they use the device or not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_PINNED = "spmd_pinned"


def kernels() -> dict[str, Callable[..., Any]]:
    """Kernels for CPU tensors by overload name; torch's own ask the device for an allocator."""
    return {"_pin_memory": pin_memory, "is_pinned": is_pinned}


def pin_memory(self: torch.Tensor, device: Any = None) -> torch.Tensor:
    """A copy in pinned memory, same strides; called for tensors that are not pinned."""
    copy = torch.empty_strided(self.shape, self.stride(), dtype=self.dtype).copy_(self)
    setattr(copy.untyped_storage(), _PINNED, True)
    return copy


def is_pinned(self: torch.Tensor, device: Any = None) -> bool:
    """Whether `pin_memory` made it, or what it is a view of."""
    return getattr(self.untyped_storage(), _PINNED, False)
