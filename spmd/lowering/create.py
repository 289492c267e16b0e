"""Factory ops: tensors from sizes and numbers."""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from spmd.lowering._arithmetic import fused_multiply_add, quotient
from spmd.lowering._registry import lower
from spmd.lowering.bessel import i0


@lower("zeros_like")
def zeros_like(self: Any, *, dtype: Any = None) -> Any:
    return jnp.zeros(self.shape, dtype)


@lower("ones_like")
def ones_like(self: Any, *, dtype: Any = None) -> Any:
    return jnp.ones(self.shape, dtype)


@lower("full_like")
def full_like(self: Any, fill_value: Any, *, dtype: Any = None) -> Any:
    return jnp.full(self.shape, fill_value, dtype)


@lower("zeros", "_efficientzerotensor")
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
    return jnp.full(self.shape, value != 0 if self.dtype == jnp.bool_ else value, self.dtype)


@lower("fill.Tensor")
def fill_tensor(self: Any, value: Any) -> Any:
    return jnp.broadcast_to(value.astype(self.dtype), self.shape)


@lower("zero")
def zero(self: Any) -> Any:
    return jnp.zeros(self.shape, self.dtype)


@lower("arange.start_step", static=("start", "end", "step"))
def arange_start_step(start: Any, end: Any, step: Any = 1, *, dtype: Any = None) -> Any:
    if dtype == jnp.int64:  # like torch, which truncates all three to integers first
        start, end, step = int(start), int(end), int(step)
    if all(isinstance(number, int) for number in (start, end, step)):
        count, wide = -((start - end) // step), jnp.int64
    else:
        count, wide = math.ceil((end - start) / step), jnp.float64
        wide = jnp.int64 if jnp.issubdtype(dtype, jnp.integer) else wide
        start, step = (int(start), int(step)) if wide == jnp.int64 else (start, step)
    indices = lax.iota(wide, max(count, 0))
    return (indices if (start, step) == (0, 1) else indices * step + start).astype(dtype)


@lower("arange.start", static=("start", "end"))
def arange_start(start: Any, end: Any, *, dtype: Any = None) -> Any:
    return arange_start_step(start, end, dtype=dtype)


@lower("arange", static=("end",))
def arange(end: Any, *, dtype: Any = None) -> Any:
    return arange_start_step(0, end, dtype=dtype)


@lower("range.step", static=("start", "end", "step"))
def range_step(start: Any, end: Any, step: Any = 1, *, dtype: Any = None) -> Any:
    """Like `arange`, but includes `end`. Deprecated in torch."""
    count = math.floor((end - start) / step) + 1
    return (jnp.asarray(start, dtype) + lax.iota(jnp.int64, max(count, 0)).astype(dtype) * jnp.asarray(step, dtype)).astype(dtype)


@lower("range", static=("start", "end"))
def range_(start: Any, end: Any, *, dtype: Any = None) -> Any:
    return range_step(start, end, dtype=dtype)


@lower("linspace", "linspace.Tensor_Tensor", "linspace.Tensor_Scalar", "linspace.Scalar_Tensor")
def linspace(start: Any, end: Any, steps: int, *, dtype: Any = None) -> Any:
    """Computed from both ends inwards, like torch, so that both ends are exact. Decisions at edges of bins need all of its bits."""
    exact = jnp.float64 if jnp.issubdtype(dtype, jnp.integer) else dtype
    wide = jnp.promote_types(exact, jnp.float32)
    start, end = jnp.asarray(start).astype(wide), jnp.asarray(end).astype(wide)
    if steps == 1:
        return start.reshape(1).astype(dtype)
    if jnp.issubdtype(dtype, jnp.integer):
        start, end = jnp.trunc(start), jnp.trunc(end)
    indices = lax.iota(jnp.int64, steps)
    is_first, last = indices < steps // 2, steps - 1 - indices
    if jnp.issubdtype(wide, jnp.complexfloating):
        step = (end - start) / (steps - 1)
        return jnp.where(is_first, start + step * indices, end - step * last).astype(dtype)
    step = quotient(end - start, jnp.asarray(steps - 1, wide))
    counts = jnp.where(is_first, indices, -last).astype(wide)
    return fused_multiply_add(step, counts, jnp.where(is_first, start, end)).astype(dtype)


@lower("logspace", "logspace.Tensor_Tensor", "logspace.Tensor_Scalar", "logspace.Scalar_Tensor", static=("base",))
def logspace(start: Any, end: Any, steps: int, base: float = 10.0, *, dtype: Any = None) -> Any:
    wide = dtype if jnp.issubdtype(dtype, jnp.complexfloating) else jnp.float64
    if jnp.issubdtype(dtype, jnp.integer):
        start, end = jnp.trunc(jnp.asarray(start)), jnp.trunc(jnp.asarray(end))
    return jnp.power(jnp.asarray(base, wide), linspace(start, end, steps, dtype=wide)).astype(dtype)


@lower("kaiser_window", "kaiser_window.periodic", "kaiser_window.beta")
def kaiser_window(window_length: int, periodic: bool = True, beta: float = 12.0, *, dtype: Any = None) -> Any:
    if window_length <= 1:
        return jnp.ones(window_length, dtype)
    middle = (window_length if periodic else window_length - 1) / 2
    indices = (lax.iota(jnp.float64, window_length) - middle) / middle
    return (i0(beta * jnp.sqrt(1 - indices**2)) / i0(jnp.float64(beta))).astype(dtype)


@lower("eye")
def eye(n: int, *, dtype: Any = None) -> Any:
    return jnp.eye(n, dtype=dtype)


@lower("eye.m")
def eye_m(n: int, m: int, *, dtype: Any = None) -> Any:
    return jnp.eye(n, m, dtype=dtype)


@lower("scalar_tensor")
def scalar_tensor(s: Any, *, dtype: Any = None) -> Any:
    return jnp.asarray(s).astype(dtype)


@lower("tril_indices")
def tril_indices(row: int, col: int, offset: int = 0, *, dtype: Any = None) -> Any:
    return jnp.asarray(np.stack(np.tril_indices(row, offset, col)), dtype)


@lower("triu_indices")
def triu_indices(row: int, col: int, offset: int = 0, *, dtype: Any = None) -> Any:
    return jnp.asarray(np.stack(np.triu_indices(row, offset, col)), dtype)
