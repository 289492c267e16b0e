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
    wanted, device = _wanted(self, kwargs)
    if device != "jax":
        return torch.empty_strided(wanted.shape, wanted.stride(), dtype=wanted.dtype, device=device)
    buffer = buffer_of(self)
    if not _lies_as_marked(self) or not wanted.is_contiguous() or buffer.annotation is None:
        return empty_strided(wanted.shape, wanted.stride(), dtype=wanted.dtype)
    with exact_dtypes():
        out = wrap(jnp.zeros(tuple(wanted.shape), to_numpy_dtype(wanted.dtype), device=buffer.annotation.to_jax()))
    buffer_of(out).annotation = buffer.annotation
    return out


def zeros_like(self: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    """`torch.zeros_like`."""
    return full_like(self, 0, **kwargs)


def ones_like(self: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    """`torch.ones_like`."""
    return full_like(self, 1, **kwargs)


def full_like(self: torch.Tensor, fill_value: Any, **kwargs: Any) -> torch.Tensor:
    """`torch.full_like`; born with its value, which is how state that a first step creates is told from what it does to it."""
    wanted, device = _wanted(self, kwargs)
    if wanted.is_contiguous() and (device != "jax" or not _lies_as_marked(self)):
        return torch.full(tuple(wanted.shape), fill_value, dtype=wanted.dtype, device=device)
    return empty_like(self, **kwargs).fill_(fill_value)


def _wanted(self: torch.Tensor, kwargs: dict[str, Any]) -> tuple[torch.Tensor, str]:
    """The result's shape, strides and dtype, and the type of its device."""
    shape = torch.empty_strided(self.shape, self.stride(), dtype=self.dtype, device="meta")
    wanted = torch.empty_like(shape, dtype=kwargs.get("dtype"), memory_format=kwargs.get("memory_format") or torch.preserve_format)
    device = kwargs.get("device")
    return wanted, "jax" if device is None else torch.device(device).type


def _lies_as_marked(tensor: torch.Tensor) -> bool:
    buffer = buffer_of(tensor)
    return buffer.annotation is not None and recording.get() is None and is_whole(tensor, buffer)
