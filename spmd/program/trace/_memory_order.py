"""How the values of a strided argument are stored in a buffer of their own, so that a trace sees the strides that PyTorch would.

order = memory_order(size=(4, 5), stride=(6, 1))   # x[:, 1:] of a tensor of shape (4, 6)
order.extents                                      # (4, 6): the storage that the trace gets
order.stride                                       # (6, 1): the tensor on it
"""

from __future__ import annotations

import functools
import math
import operator
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from jax import lax

from spmd.base._convert import host_array
from spmd.device._views import contiguous_stride

Shape = tuple[int, ...]

# The gaps between elements keep their length in a storage of at most so many elements, or so many per element of the tensor.
_MAX_KEPT = 1 << 14
_MAX_RATIO = 2


class MemoryOrder(NamedTuple):
    """The storage for the values of a tensor, in the order of their addresses.

    Attributes:
        size, steps: the sizes and strides (elements) with which the values are read from the tensor's memory: its dims by decreasing
            stride, each element once. If the elements of two dims interleave or overlap, or no row has a whole number of steps of the
            next dim, all elements from the first to the last one, as one dim.
        extents: shape of the storage. A dim is larger than in `size` if other elements lie between two of its rows; if they lie between
            neighbours along the last dim, there is one dim more.
        stride: the tensor's strides on the storage. They are its own, unless gaps were shortened: a column of a large table is stored
            with gaps of one element. PyTorch allows the same views of both.
        memory: the tensor's own strides along the dims of `extents`.
    """

    size: Shape
    steps: Shape
    extents: Shape
    stride: Shape
    memory: Shape

    def is_all_of(self, shape: Shape, is_stack: bool) -> bool:
        """Whether the values are all elements of a storage of this shape, without gaps. Of a stack, the first dim must be the same."""
        is_all = math.prod(self.size) == math.prod(self.extents) == math.prod(shape)
        return is_all and (not is_stack or self.extents == shape)

    def filled(self, values: Any) -> Any:
        """An array of shape `extents`, of the library of `values`, which have shape `size`.

        The gaps hold NaN or the least integer. Only `as_strided` could read them.
        """
        if values.shape == self.extents:
            return values
        values = values.reshape(*self.size, *(1 for _ in self.extents[len(self.size) :]))
        widths = [(0, extent - n) for extent, n in zip(self.extents, values.shape, strict=True)]
        filler = np.asarray(_least(values.dtype)).astype(values.dtype)
        if isinstance(values, np.ndarray):
            return np.pad(values, widths, constant_values=filler)
        return lax.pad(values, filler, [(*width, 0) for width in widths])


@functools.lru_cache(maxsize=4096)
def memory_order(size: Shape, stride: Shape, is_stack: bool = False) -> MemoryOrder:
    """The memory order of a tensor with these sizes and strides (elements).

    Args:
        is_stack: the first dim comes first, whatever its stride.
    """
    if is_stack:
        one = memory_order(size[1:], stride[1:])
        length, lead, step = math.prod(one.extents), size[:1], stride[:1]
        return MemoryOrder(lead + one.size, step + one.steps, lead + one.extents, (length, *one.stride), step + one.memory)
    live = sorted(((s, n, dim) for dim, (n, s) in enumerate(zip(size, stride, strict=True)) if n > 1 and s > 0), reverse=True)
    steps, counts, dims = tuple(s for s, *_ in live), tuple(n for _, n, _ in live), [dim for *_, dim in live]
    span = 0 if 0 in size else 1 + sum(s * (n - 1) for s, n, _ in live)
    at_most = max(_MAX_KEPT, _MAX_RATIO * math.prod(counts))
    is_nested = all(above >= below * n for above, (below, n, _) in zip(steps, live[1:], strict=False))
    has_rows = all(above % below == 0 for above, below in pairwise(steps))
    if not span or not is_nested or (not has_rows and span <= at_most):
        return MemoryOrder((span,), (1,), (span,), stride, (1,))
    extents = (*counts[:1], *(above // below for above, below in pairwise(steps)))
    gap = steps[-1] if steps else 1
    if not has_rows or math.prod(extents) * gap > at_most:
        extents = (*counts[:1], *(n + (above > below * n) for above, (below, n, _) in zip(steps, live[1:], strict=False)))
        gap = min(gap, 2)
    last = (gap,) if gap > 1 else ()
    extents, memory = (*extents, *last), (*steps, *(1 for _ in last))
    own = list(stride)
    for dim, n in enumerate(size):
        if dim in dims:
            own[dim] = contiguous_stride(extents)[dims.index(dim)]
        elif n == 1:  # any stride; the one at the same place on the storage
            places = _places(stride[dim], memory)
            own[dim] = stride[dim] if places is None else sum(map(operator.mul, places, contiguous_stride(extents)))
    return MemoryOrder(counts, steps, extents, tuple(own), memory)


def stored_values(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """A copy of the values of a CPU tensor, as its storage in a trace has them, without a pending conjugation or negation."""
    plain = without_pending(tensor.detach())
    if plain.is_contiguous():
        return host_array(plain)
    order = memory_order(tuple(plain.shape), plain.stride())
    return order.filled(host_array(plain.as_strided(order.size, order.steps)))


def without_pending(tensor: torch.Tensor) -> torch.Tensor:
    """The view of a tensor's memory without its pending conjugation and negation."""
    tensor = torch.ops.aten._neg_view(tensor) if tensor.is_neg() else tensor
    return torch.ops.aten._conj(tensor) if tensor.is_conj() else tensor


def is_permuted(tensor: torch.Tensor) -> bool:
    """Whether the tensor would be contiguous in another order of its dims, and is not in this one."""
    if tensor.is_contiguous():
        return False
    order = memory_order(tuple(tensor.shape), tensor.stride())
    return math.prod(order.size) == math.prod(order.extents) == tensor.numel()


def permuted(tensor: torch.Tensor) -> torch.Tensor:
    """The contiguous tensor of the same memory, of a tensor that `is_permuted`."""
    order = memory_order(tuple(tensor.shape), tensor.stride())
    return tensor.detach().as_strided(order.size, order.steps)


def _least(dtype: np.dtype[Any]) -> Any:
    if dtype == np.bool_:
        return False
    return np.iinfo(dtype).min if np.issubdtype(dtype, np.integer) else np.nan


def _places(step: int, memory: Shape) -> Shape | None:
    """The number of steps along each of the dims with strides `memory` that lead `step` elements further; None if none do."""
    places: list[int] = []
    for stride in memory:
        place, step = divmod(step, stride)
        places.append(place)
    return None if step else tuple(places)


__all__ = ["MemoryOrder", "is_permuted", "memory_order", "permuted", "stored_values", "without_pending"]
