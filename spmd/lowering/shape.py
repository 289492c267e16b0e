"""Ops that rearrange elements into new tensors (views have no lowering: they are strides)."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax

from spmd.lowering._registry import lower


@lower("cat")
def cat(tensors: Any, dim: int = 0) -> Any:
    kept = [t for t in tensors if t.shape != (0,)]
    return jnp.concatenate(kept or tensors, axis=dim if kept else 0)


@lower("stack")
def stack(tensors: Any, dim: int = 0) -> Any:
    return jnp.stack(tensors, axis=dim)


@lower("repeat")
def repeat(self: Any, repeats: Any) -> Any:
    return jnp.tile(self, repeats)


@lower("flip")
def flip(self: Any, dims: Any) -> Any:
    return jnp.flip(self, dims)


@lower("roll")
def roll(self: Any, shifts: Any, dims: Any = ()) -> Any:
    return jnp.roll(self, shifts, dims or None) if dims else jnp.roll(self.reshape(-1), shifts[0]).reshape(self.shape)


@lower("tril")
def tril(self: Any, diagonal: int = 0) -> Any:
    return jnp.tril(self, diagonal)


@lower("triu")
def triu(self: Any, diagonal: int = 0) -> Any:
    return jnp.triu(self, diagonal)


@lower("slice_backward")
def slice_backward(grad_output: Any, input_sizes: Any, dim: int, start: int, end: int, step: int) -> Any:
    """Zeros of `input_sizes` with the gradient in the slice: one pad."""
    size = input_sizes[dim]
    start = min(max(start + size if start < 0 else start, 0), size)
    count = grad_output.shape[dim]
    spread = (count - 1) * step + 1 if count else 0
    padding = [(0, 0, 0)] * len(input_sizes)
    padding[dim] = (start, size - start - spread, step - 1)
    return lax.pad(grad_output, jnp.zeros((), grad_output.dtype), padding)


@lower("select_backward")
def select_backward(grad_output: Any, input_sizes: Any, dim: int, index: int) -> Any:
    dim, index = dim % len(input_sizes), index % input_sizes[dim]
    padding = [(0, 0, 0)] * len(input_sizes)
    padding[dim] = (index, input_sizes[dim] - index - 1, 0)
    return lax.pad(jnp.expand_dims(grad_output, dim), jnp.zeros((), grad_output.dtype), padding)


@lower("constant_pad_nd")
def constant_pad_nd(self: Any, pad: Any, value: Any = 0) -> Any:
    padding = [(0, 0, 0)] * self.ndim
    for i in range(len(pad) // 2):
        padding[self.ndim - 1 - i] = (pad[2 * i], pad[2 * i + 1], 0)
    return lax.pad(self, jnp.asarray(value, self.dtype), padding)
