"""Runs recorded operations on other buffers: with abstract values to find their results, and with tracers to make a program."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from spmd.base._torch import create_empty_tensor
from spmd.device._storage import META, Buffer, buffer_of, contiguous_stride, strided_alias
from spmd.program.lazy._described import Ref, filled

_set_window = torch.ops.aten.set_.source_Storage_storage_offset


class New(NamedTuple):
    """A new tensor of an operation: `made` is the index among the buffers that it creates; the rest is the view of that buffer."""

    made: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype


class Argument(NamedTuple):
    """A result that is an argument of the operation itself; `given` is its index among the tensor arguments."""

    given: int


def tensor_over(buffer: Buffer, dtype: torch.dtype) -> torch.Tensor:
    """A new device tensor that views a whole buffer."""
    tensor = create_empty_tensor(buffer.shape, dtype)
    tensor.untyped_storage().spmd_buffer = buffer  # pyright: ignore[reportAttributeAccessIssue]
    return tensor


def window(base: torch.Tensor, ref: Ref | New) -> torch.Tensor:
    """The view that a reference describes, on the storage of `base`."""
    if ref.dtype == base.dtype:
        if ref.size == base.shape and ref.offset == 0 and ref.stride == contiguous_stride(ref.size):
            return base
        return strided_alias(base, ref.size, ref.stride, ref.offset)
    other = create_empty_tensor((0,), ref.dtype)
    return _set_window.redispatch(META, other, base.untyped_storage(), ref.offset, ref.size, ref.stride)


class Replay:
    """A buffer for each place, and operations that run on these buffers."""

    def __init__(self) -> None:
        self._bases: dict[int, torch.Tensor] = {}
        self._given: list[tuple[torch.Tensor, Ref]] = []

    def put(self, place: int, buffer: Buffer, dtype: torch.dtype) -> None:
        """Set the buffer at a place. `dtype` is the torch dtype of the whole buffer."""
        self._bases[place] = tensor_over(buffer, dtype)

    def bind(self, place: int, tensor: torch.Tensor) -> None:
        """Set the buffer at a place to that of `tensor`, a result of an operation."""
        self._bases[place] = _base_of(tensor)

    def has(self, place: int) -> bool:
        return place in self._bases

    def buffer(self, place: int) -> Buffer:
        return buffer_of(self._bases[place])

    def run(self, operation: Any, args: Sequence[Any], kwargs: dict[str, Any], numbers: list[Any]) -> tuple[Any, list[torch.Tensor]]:
        """Run the kernel of an operation.

        Args:
            args, kwargs: templates of its arguments.
            numbers: its Python numbers.

        Returns:
            (result of the kernel, tensor arguments in order).
        """
        given: list[torch.Tensor] = []

        def tensor_of(ref: Ref) -> torch.Tensor:
            given.append(window(self._bases[ref.place], ref).detach())
            self._given.append((given[-1], ref))
            return given[-1]

        self._given.clear()

        filled_args = [filled(arg, tensor_of, numbers) for arg in args]
        filled_kwargs = {name: filled(arg, tensor_of, numbers) for name, arg in kwargs.items()}
        with torch.no_grad():
            return operation.kernel(*filled_args, **filled_kwargs), given

    def has_resized(self) -> bool:
        """Whether the last operation changed the size or strides of an argument."""
        return any(tuple(t.shape) != ref.size or t.stride() != ref.stride for t, ref in self._given)


def _base_of(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor that views the whole buffer of `tensor`, a new result of an operation."""
    buffer = buffer_of(tensor)
    if tensor.shape == buffer.shape and tensor.is_contiguous() and tensor.storage_offset() == 0:
        return tensor
    return strided_alias(tensor, buffer.shape, contiguous_stride(buffer.shape), 0)


__all__ = ["New", "Replay", "Argument", "tensor_over", "window"]
