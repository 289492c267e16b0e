"""Factory ops: tensors from sizes and numbers."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from spmd.lowering._registry import lower


@lower("zeros_like")
def zeros_like(self: Any, *, dtype: Any = None) -> Any:
    return jnp.zeros(self.shape, dtype)


@lower("ones_like")
def ones_like(self: Any, *, dtype: Any = None) -> Any:
    return jnp.ones(self.shape, dtype)


@lower("full_like")
def full_like(self: Any, fill_value: Any, *, dtype: Any = None) -> Any:
    return jnp.full(self.shape, fill_value, dtype)


@lower("zeros")
def zeros(size: Any, *, dtype: Any = None) -> Any:
    return jnp.zeros(size, dtype)


@lower("ones")
def ones(size: Any, *, dtype: Any = None) -> Any:
    return jnp.ones(size, dtype)


@lower("full")
def full(size: Any, fill_value: Any, *, dtype: Any = None) -> Any:
    return jnp.full(size, fill_value, dtype)


@lower("new_zeros")
def new_zeros(self: Any, size: Any, *, dtype: Any = None) -> Any:
    return jnp.zeros(size, dtype)


@lower("new_ones")
def new_ones(self: Any, size: Any, *, dtype: Any = None) -> Any:
    return jnp.ones(size, dtype)


@lower("new_full")
def new_full(self: Any, size: Any, fill_value: Any, *, dtype: Any = None) -> Any:
    return jnp.full(size, fill_value, dtype)


@lower("fill.Scalar")
def fill_scalar(self: Any, value: Any) -> Any:
    return jnp.full(self.shape, value, self.dtype)


@lower("fill.Tensor")
def fill_tensor(self: Any, value: Any) -> Any:
    return jnp.broadcast_to(value.astype(self.dtype), self.shape)


@lower("zero")
def zero(self: Any) -> Any:
    return jnp.zeros(self.shape, self.dtype)


@lower("arange", static=("end",))
def arange(end: Any, *, dtype: Any = None) -> Any:
    return jnp.arange(end, dtype=dtype)


@lower("arange.start", static=("start", "end"))
def arange_start(start: Any, end: Any, *, dtype: Any = None) -> Any:
    return jnp.arange(start, end, dtype=dtype)


@lower("arange.start_step", static=("start", "end", "step"))
def arange_start_step(start: Any, end: Any, step: Any = 1, *, dtype: Any = None) -> Any:
    return jnp.arange(start, end, step, dtype=dtype)
