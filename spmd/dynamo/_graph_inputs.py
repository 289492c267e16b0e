"""Passes device tensors to a graph's program and writes updated inputs back."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch

from mesh import Mesh
from spmd.device._layout import state_sharding_of
from spmd.device._storage import Buffer, buffer_of, is_whole, load, store, strided_alias, wrap
from spmd.program.xla._target import lies_on


class Given(NamedTuple):
    """How the trace receives a tensor: a dense tensor as its storage with strides, any other as a contiguous copy.

    Attributes:
        root: shape of the array.
        stride: strides of the tensor over that array; None: contiguous.
        dtype: dtype of the array; None if the tensor may view it differently (conjugated).
        order: the tensor's dims in memory order, if the array may be padded along some of them; None: the array has exactly the
            tensor's elements.
    """

    root: tuple[int, ...]
    size: tuple[int, ...]
    stride: tuple[int, ...] | None
    dtype: Any
    wants_gradient: bool
    order: tuple[int, ...] | None = None

    def in_trace(self, array: Any) -> torch.Tensor:
        """The tensor in the trace."""
        tensor = wrap(array)
        if self.stride is not None:
            tensor = strided_alias(tensor, self.size, self.stride, 0)
        return tensor.requires_grad_(self.wants_gradient)


def example_of(tensor: torch.Tensor, mesh: Mesh | None, replicated: Any) -> Any:
    """The program's array for a tensor: its storage if the tensor covers all of it, else a copy of its elements."""
    buffer = buffer_of(tensor)
    buffer.settle()
    if mesh is not None and not lies_on(buffer.raw(), mesh):
        buffer.place(replicated)
    return buffer.get() if is_dense(tensor, buffer) else load(tensor)


def is_dense(tensor: torch.Tensor, buffer: Buffer) -> bool:
    """Whether the tensor shows every element of its storage exactly once and unmodified."""
    if is_whole(tensor, buffer):
        return True
    if tensor.numel() != math.prod(buffer.shape) or tensor.storage_offset() or tensor.is_conj() or tensor.is_neg():
        return False
    dims = sorted((st, n) for st, n in zip(tensor.stride(), tensor.shape, strict=True) if n != 1)
    step = 1
    for stride, size in dims:
        if stride != step:
            return False
        step *= size
    return tensor.element_size() == buffer.dtype.itemsize


def given_as(tensor: torch.Tensor, wants_gradient: bool) -> Given:
    """How the trace receives `tensor`."""
    buffer = buffer_of(tensor)
    size = tuple(tensor.shape)
    stride = tensor.stride() if not is_whole(tensor, buffer) and is_dense(tensor, buffer) else None
    dtype = None if tensor.dtype.is_complex else buffer.dtype
    return Given(size if stride is None else buffer.shape, size, stride, dtype, wants_gradient)


def write_back(tensor: torch.Tensor, stride: tuple[int, ...] | None, value: Any) -> None:
    """Store the new value of an input that the graph wrote to, and increment the version counter, as autograd does."""
    buffer = buffer_of(tensor)
    if stride is not None or is_whole(tensor, buffer):
        buffer.set(value)
    else:
        store(tensor, value)
    if not tensor.is_inference():
        torch.autograd.graph.increment_version(tensor)


def layout_of(tensor: torch.Tensor, size: tuple[int, ...]) -> Any:
    """The sharding of values written to a tensor and of its gradient; None if the compiler may choose.

    Args:
        size: the tensor's shape in the program.
    """
    buffer = buffer_of(tensor)
    spec = state_sharding_of(tensor) if tensor.requires_grad else buffer.annotation
    if spec is None or spec.padded_shape(size) != size or tuple(tensor.shape) != buffer.shape:
        return None
    return spec.to_jax()


__all__ = ["Given", "example_of", "given_as", "layout_of", "write_back"]
