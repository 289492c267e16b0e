"""Cumulative reductions along one dim."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from spmd.lowering._padded_windows import apart
from spmd.lowering._registry import lower
from spmd.lowering.pointwise import logaddexp
from spmd.lowering.reduce import accumulated_in


@lower("cumsum")
def cumsum(self: Any, dim: int, *, dtype: Any = None) -> Any:
    x = self.astype(accumulated_in(dtype))
    return x if self.ndim == 0 else jnp.cumsum(x, dim)


@lower("cumprod")
def cumprod(self: Any, dim: int, *, dtype: Any = None) -> Any:
    x = self.astype(accumulated_in(dtype))
    return x if self.ndim == 0 else jnp.cumprod(apart(x, 1), dim)


@lower("logcumsumexp")
def logcumsumexp(self: Any, dim: int) -> Any:
    if self.ndim == 0 or self.size == 0:
        return self
    dim %= self.ndim
    x = self.astype(accumulated_in(self.dtype))
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        return lax.associative_scan(logaddexp, x, axis=dim)
    return lax.cumlogsumexp(apart(x, -np.inf), dim)


@lower("cummax")
def cummax(self: Any, dim: int) -> Any:
    return _running_extreme(self, dim, lax.cummax, -np.inf)


@lower("cummin")
def cummin(self: Any, dim: int) -> Any:
    return _running_extreme(self, dim, lax.cummin, np.inf)


def _running_extreme(self: Any, dim: int, extreme: Any, start: float) -> Any:
    """(cumulative extremes, their positions): of equal elements the last, and after a NaN the last NaN, as in torch."""
    if self.ndim == 0 or self.size == 0:
        return self, jnp.zeros(self.shape, jnp.int64)
    dim %= self.ndim
    number = apart(self.astype(jnp.uint8) if self.dtype == jnp.bool_ else self, start)
    found = extreme(number, dim).astype(self.dtype)
    is_one = self == found
    if jnp.issubdtype(self.dtype, jnp.floating):
        is_one |= jnp.isnan(self)
    indices = lax.broadcasted_iota(jnp.int64, self.shape, dim)
    return found, lax.cummax(jnp.where(is_one, indices, 0), dim)
