"""`empty_like` and its kin: a tensor made like a marked one is laid out as it is.

So an optimizer's state has its parameter's layout from the start, and no device ever holds more of it than its shard.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import torch

from spmd._convert import exact_dtypes, to_numpy_dtype
from spmd.device._copy import empty_strided
from spmd.device._storage import buffer_of, is_whole, recording, wrap


def empty_like(self: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    """`torch.empty_like`: zeros, as `torch.empty` here."""
    device = kwargs.get("device")
    shape = torch.empty_strided(self.shape, self.stride(), dtype=self.dtype, device="meta")
    wanted = torch.empty_like(shape, dtype=kwargs.get("dtype"), memory_format=kwargs.get("memory_format") or torch.preserve_format)
    if device is not None and torch.device(device).type != "jax":
        return torch.empty_strided(wanted.shape, wanted.stride(), dtype=wanted.dtype, device=device)
    buffer = buffer_of(self)
    if buffer.annotation is None or recording.get() is not None or not is_whole(self, buffer) or not wanted.is_contiguous():
        return empty_strided(wanted.shape, wanted.stride(), dtype=wanted.dtype)
    with exact_dtypes():
        out = wrap(jnp.zeros(tuple(wanted.shape), to_numpy_dtype(wanted.dtype), device=buffer.annotation.to_jax()))
    buffer_of(out).annotation = buffer.annotation
    return out


def zeros_like(self: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    """`torch.zeros_like`."""
    return empty_like(self, **kwargs).zero_()


def ones_like(self: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    """`torch.ones_like`."""
    return empty_like(self, **kwargs).fill_(1)


def full_like(self: torch.Tensor, fill_value: Any, **kwargs: Any) -> torch.Tensor:
    """`torch.full_like`."""
    return empty_like(self, **kwargs).fill_(fill_value)
