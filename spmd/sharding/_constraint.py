"""A value, and its gradient, laid out in a given way at one point of a program: what activations and gathered parameters need.

`mark_sharding` says how a tensor lies, in place; this makes a new tensor on autograd's tape, whose gradient may be laid out in
another way than its value. In a compiled function both are constraints; eagerly the new tensor is marked.
"""

from __future__ import annotations

from typing import Any

import jax
import torch

from mesh import ShardingSpec
from spmd.base._convert import exact_dtypes
from spmd.base._jax import is_tracer
from spmd.device._storage import buffer_of, load, recording, wrap
from spmd.sharding._tensor import XLAShardedTensor, become_sharded


def constrain(tensor: torch.Tensor, value: ShardingSpec, gradient: ShardingSpec | None) -> XLAShardedTensor:
    """A new tensor with the values of `tensor`, laid out by `value`; its gradient by `gradient` (None: as it comes)."""
    return become_sharded(_Constrained.apply(tensor, value, gradient))  # pyright: ignore[reportArgumentType]


def placed(array: Any, sharding: ShardingSpec | None) -> Any:
    """An array or tracer laid out by `sharding`."""
    if sharding is None:
        return array
    with exact_dtypes():
        if is_tracer(array) or recording.get() is not None:
            return jax.lax.with_sharding_constraint(array, sharding.to_jax())
        even = sharding.padded_shape(array.shape) == array.shape
        return jax.device_put(array, sharding.to_jax()) if even else array  # jax has no array in uneven pieces


class _Constrained(torch.autograd.Function):
    """Identity with a layout on the way there and one on the way back."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, value: ShardingSpec, gradient: Any) -> torch.Tensor:
        ctx.gradient = gradient
        recorder = recording.get()
        if recorder is not None:
            recorder.laid_out(value)
        if recorder is not None or is_tracer(buffer_of(tensor).value):
            return wrap(placed(load(tensor), value))
        copy = tensor.as_subclass(torch.Tensor).clone(memory_format=torch.contiguous_format)
        buffer_of(copy).annotate(value)
        return copy

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return grads[0] if ctx.gradient is None else constrain(grads[0], ctx.gradient, None), None, None


__all__ = ["constrain", "placed"]
