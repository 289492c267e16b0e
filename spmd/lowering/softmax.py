"""The softmax family and its backward ops. 16-bit floats are normalised in float32."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from spmd.lowering._registry import lower
from spmd.lowering.norm import wide


def _along(fn: Callable[..., Any], x: Any, dim: int) -> Any:
    """`fn(x, axis=dim)`, in float32 for 16-bit floats. torch accepts dim 0 for a 0-dim tensor."""
    return fn(wide(x), axis=dim) if x.ndim else fn(wide(x)[None], axis=0)[0]


@lower("softmax.int", "special_softmax", whole=True)
def softmax(self: Any, dim: int, dtype: Any = None) -> Any:
    x = self if dtype is None else self.astype(dtype)
    return _along(jax.nn.softmax, x, dim).astype(x.dtype)


@lower("log_softmax.int", "special_log_softmax", whole=True)
def log_softmax(self: Any, dim: int, dtype: Any = None) -> Any:
    x = self if dtype is None else self.astype(dtype)
    return _along(jax.nn.log_softmax, x, dim).astype(x.dtype)


@lower("_softmax")
def _softmax(self: Any, dim: int, half_to_float: bool) -> Any:
    return _along(jax.nn.softmax, self, dim)


@lower("_log_softmax")
def _log_softmax(self: Any, dim: int, half_to_float: bool) -> Any:
    return _along(jax.nn.log_softmax, self, dim)


@lower("_softmax_backward_data")
def _softmax_backward_data(grad_output: Any, output: Any, dim: int, input_dtype: Any) -> Any:
    weighted = wide(grad_output) * wide(output)
    return weighted - wide(output) * _summed(weighted, dim)


@lower("_log_softmax_backward_data")
def _log_softmax_backward_data(grad_output: Any, output: Any, dim: int, input_dtype: Any) -> Any:
    g = wide(grad_output)
    return g - jnp.exp(wide(output)) * _summed(g, dim)


def _summed(x: Any, dim: int) -> Any:
    return jnp.sum(x, dim, keepdims=True) if x.ndim else x


@lower("_safe_softmax")
def _safe_softmax(self: Any, dim: int, dtype: Any = None) -> Any:
    """Softmax that gives zeros instead of NaN for a row of only -inf."""
    x = self if dtype is None else self.astype(dtype)
    return safe_softmax(wide(x), dim).astype(x.dtype)


def safe_softmax(x: Any, dim: int) -> Any:
    """Softmax of `x`, with zeros where all elements along `dim` are -inf. The gradient is not NaN there either."""
    largest = jax.lax.stop_gradient(jnp.max(x, dim, keepdims=True, initial=-jnp.inf))
    exponentials = jnp.exp(x - jnp.where(jnp.isneginf(largest), jnp.zeros((), x.dtype), largest))
    total = jnp.sum(exponentials, dim, keepdims=True)
    return exponentials / jnp.where(total == 0, jnp.ones((), x.dtype), total)


@lower("_masked_softmax")
def _masked_softmax(self: Any, mask: Any, dim: int | None = None, mask_type: int | None = None) -> Any:
    """Softmax over the elements whose mask is False. The mask is [T, T] (type 0), [B, S] (type 1) or has the shape of `self`."""
    x = wide(self)
    if mask_type == 0 and mask.ndim == 2:
        mask = mask[None, None]
    elif mask_type == 1 and mask.ndim == 2:
        mask = mask[:, None, None]
    return safe_softmax(jnp.where(mask.astype(bool), -jnp.inf, x), x.ndim - 1 if dim is None else dim)


@lower("_masked_softmax_backward")
def _masked_softmax_backward(grad_output: Any, output: Any, mask: Any, dim: int | None = None) -> Any:
    return _softmax_backward_data(grad_output, output, output.ndim - 1 if dim is None else dim, None)
