"""Layout constraints on a value and its gradient at one point of a program, for activations and gathered parameters.

`mark_sharding` lays out a tensor in place. `constrain` makes a new tensor on autograd's tape, and its gradient may have another
layout than its value. In a compiled function both layouts are constraints; eagerly the new tensor is marked.
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
    """A new tensor with the values of `tensor` and layout `value`; its gradient gets layout `gradient` (None: unconstrained)."""
    return become_sharded(_Constrained.apply(tensor, value, gradient))  # pyright: ignore[reportArgumentType]


def placed(array: Any, sharding: ShardingSpec | None) -> Any:
    """`array`, or the traced value, with layout `sharding` (None: unchanged)."""
    if sharding is None:
        return array
    with exact_dtypes():
        if is_tracer(array) or recording.get() is not None:
            return jax.lax.with_sharding_constraint(array, sharding.to_jax())
        even = sharding.padded_shape(array.shape) == array.shape
        return jax.device_put(array, sharding.to_jax()) if even else array  # a jax.Array cannot have uneven shards


class _Constrained(torch.autograd.Function):
    """Identity that constrains the value in the forward pass and the gradient in the backward pass."""

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
