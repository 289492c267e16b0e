"""Tensors filled with one number, and tensors made like another one: `zeros`, `full_like`, `empty_like` and similar ops.

Eagerly they take no memory before their first use, and a tensor made like a marked tensor gets its layout. An optimizer's state
therefore has its parameter's layout from the start, and no device ever holds more of it than its shard.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from spmd.base._convert import host_array, to_numpy_dtype
from spmd.base._errors import TraceError, called_at, message
from spmd.base._jax import is_tracing
from spmd.device import _indices
from spmd.device._copy import empty_strided
from spmd.device._host_answers import host_answer
from spmd.device._storage import Buffer, buffer_of, is_whole, load, recording, wrap_host


def empty_like(self: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    """`torch.empty_like`: zeros, as in `torch.empty` on this device."""
    device = kwargs.get("device")
    shape = torch.empty_strided(self.shape, self.stride(), dtype=self.dtype, device="meta")
    wanted = torch.empty_like(shape, dtype=kwargs.get("dtype"), memory_format=kwargs.get("memory_format") or torch.preserve_format)
    if device is not None and torch.device(device).type != "jax":
        return torch.empty_strided(wanted.shape, wanted.stride(), dtype=wanted.dtype, device=device)
    return _laid_out_like(self, empty_strided(wanted.shape, wanted.stride(), dtype=wanted.dtype))


def new_zeros_with_same_feature_meta(self: torch.Tensor, other: torch.Tensor, *, self_num_batch_dims: int = 0) -> torch.Tensor:
    """Zeros with the strides of `other`, in which forward mode stores a tangent whose strides differ from those of its primal `other`.

    torch's own kernel uses the size of the primal's storage, and storages of this device have no bytes.

    Args:
        self: the tangent.
        self_num_batch_dims: number of its leading batch dims (`vmap`), which the primal does not have.
    """
    extents = [(n - 1) * stride for n, stride in zip(other.shape, other.stride(), strict=True)]
    numel = other.storage_offset() + sum(extents) + 1 if other.numel() else 0
    batch = tuple(self.shape[:self_num_batch_dims])
    strides = [numel * math.prod(batch[dim + 1 :]) for dim in range(len(batch))]
    zeros = torch.zeros((*batch, numel), dtype=other.dtype, device=other.device)
    return zeros.as_strided((*batch, *other.shape), (*strides, *other.stride()), other.storage_offset())


def one_hot(self: torch.Tensor, num_classes: int = -1) -> torch.Tensor:
    """`torch.nn.functional.one_hot`; without `num_classes`, the number of columns is the largest value plus one.

    Raises:
        TraceError: only the program can compute the largest value.
    """
    if self.dtype != torch.int64:
        raise RuntimeError(f"one_hot is only applicable to index tensor of type LongTensor, but got {self.dtype}")
    if num_classes < 1 and (num_classes != -1 or not self.numel()):
        what = "Can not infer total number of classes from empty tensor."
        raise RuntimeError(what if not self.numel() else "num_classes should be positive")
    if num_classes == -1:
        largest = self.max()
        known = None if recording.get() is None else host_answer(load(largest))
        if recording.get() is not None and known is None:
            what = "one_hot without num_classes has a data-dependent number of columns"
            raise TraceError(message(what, *called_at(), fix="one_hot(x, num_classes=n)"))
        num_classes = int(largest if known is None else known) + 1
    _indices.check(_of_classes, "one_hot", {"self": self, "num_classes": num_classes})
    return (self.unsqueeze(-1) == torch.arange(num_classes, device=self.device)).to(torch.int64)


def _of_classes(named: dict[str, Any]) -> Iterator[_indices.Bound]:
    index, count = named["self"], named["num_classes"]
    yield _indices.Bound(index, 1 << 62, "Class values must be non-negative. Got {}", RuntimeError)
    yield _indices.Bound(index, count, "Class values must be smaller than num_classes. Got {}", RuntimeError)


def filled(adapter: Any, number: float | None = None) -> Any:
    """Kernel of `zeros`, `ones_like`, `full` and similar ops.

    Args:
        adapter: kernel for traces, memory formats other than row-major, and numbers that the dtype may not be able to represent.
        number: the number to fill with; None: the argument `fill_value`.
    """

    def kernel(first: Any, *rest: Any, **kwargs: Any) -> Any:
        given: Any = number if number is not None or not rest else rest[0]
        like = first if isinstance(first, torch.Tensor) else None
        dtype = kwargs.get("dtype") or (torch.get_default_dtype() if like is None else like.dtype)
        device = kwargs.get("device")
        if like is not None and device is not None and torch.device(device).type != "jax":
            return empty_like(like, **kwargs).fill_(given)  # pyright: ignore[reportCallIssue, reportArgumentType]
        plain = kwargs.get("memory_format") in (None, torch.preserve_format, torch.contiguous_format)
        exact = (int, float) if kwargs.get("dtype") or like is not None else float  # otherwise the number's type determines the dtype
        is_exact = number is None and isinstance(given, exact) and dtype.is_floating_point and dtype.itemsize > 1
        typed = number is not None or (is_exact and (abs(given) <= torch.finfo(dtype).max or not math.isfinite(given)))
        shape: Any = tuple(first if like is None else like.shape)
        if is_tracing() or not plain or not typed or not (like is None or like.is_contiguous()) or min(shape, default=0) < 0:
            return adapter(first, *rest, **kwargs)
        made = wrap_host(np.broadcast_to(np.asarray(given).astype(to_numpy_dtype(dtype)), shape))
        return made if like is None else _laid_out_like(like, made)

    return kernel


def scalar(adapter: Any) -> Any:
    """Kernel of `scalar_tensor`: a number that eager code assigns, as in `x[0] = 3`, is on the host until it is used."""

    def kernel(s: Any, **kwargs: Any) -> Any:
        if is_tracing() or recording.get() is not None or type(s) not in (bool, int, float):
            return adapter(s, **kwargs)
        return wrap_host(host_array(torch.scalar_tensor(s, dtype=kwargs.get("dtype"), device="cpu")))

    return kernel


def _laid_out_like(model: torch.Tensor, made: torch.Tensor) -> torch.Tensor:
    buffer: Buffer | None = getattr(model.untyped_storage(), "spmd_buffer", None)  # a fake tensor has none
    if buffer is None or buffer.annotation is None or recording.get() is not None:
        return made
    if is_whole(model, buffer) and is_whole(made, buffer_of(made)):
        buffer_of(made).annotate(buffer.annotation)
    return made
