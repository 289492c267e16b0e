"""Normalisations and softmax."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from spmd.lowering._registry import lower


def _wide(x: Any) -> Any:
    """16-bit floats in float32, where statistics are computed."""
    return x.astype(jnp.float32) if x.dtype in (jnp.bfloat16, jnp.float16) else x


@lower("layer_norm", whole=True)
def layer_norm(
    input: Any, normalized_shape: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5, cudnn_enable: bool = True
) -> Any:
    x = _wide(input)
    axes = tuple(range(x.ndim - len(normalized_shape), x.ndim))
    mean = jnp.mean(x, axes, keepdims=True)
    centred = x - mean
    variance = jnp.mean(centred * centred, axes, keepdims=True)
    out = centred * lax.rsqrt(variance + eps)
    if weight is not None:
        out = out * weight
    if bias is not None:
        out = out + bias
    return out.astype(input.dtype)


@lower("softmax.int", whole=True)
def softmax(self: Any, dim: int, dtype: Any = None) -> Any:
    x = self if dtype is None else self.astype(dtype)
    return jax.nn.softmax(_wide(x), axis=dim).astype(x.dtype)


@lower("log_softmax.int", whole=True)
def log_softmax(self: Any, dim: int, dtype: Any = None) -> Any:
    x = self if dtype is None else self.astype(dtype)
    return jax.nn.log_softmax(_wide(x), axis=dim).astype(x.dtype)


@lower("_softmax")
def _softmax(self: Any, dim: int, half_to_float: bool) -> Any:
    return jax.nn.softmax(_wide(self), axis=dim)


@lower("_log_softmax")
def _log_softmax(self: Any, dim: int, half_to_float: bool) -> Any:
    return jax.nn.log_softmax(_wide(self), axis=dim)
