"""Reductions over dims."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from spmd.lowering._registry import lower


def axes(dim: Any) -> tuple[int, ...] | None:
    """jax's axis argument of torch's `dim`: an int, a list of ints, or (None or empty) all."""
    if dim is None or (isinstance(dim, tuple) and not dim):
        return None
    return (dim,) if isinstance(dim, int) else tuple(dim)


@lower("sum", "sum.dim_IntList")
def sum_(self: Any, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
    return jnp.sum(self, axes(dim), dtype=dtype, keepdims=keepdim)


@lower("mean", "mean.dim")
def mean(self: Any, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
    return jnp.mean(self, axes(dim), dtype=dtype, keepdims=keepdim)


@lower("any", "any.dim", "any.dims")
def any_(self: Any, dim: Any = None, keepdim: bool = False) -> Any:
    return jnp.any(self, axes(dim), keepdims=keepdim)


@lower("all", "all.dim", "all.dims")
def all_(self: Any, dim: Any = None, keepdim: bool = False) -> Any:
    return jnp.all(self, axes(dim), keepdims=keepdim)


@lower("amax")
def amax(self: Any, dim: Any = (), keepdim: bool = False) -> Any:
    return jnp.max(self, axes(dim), keepdims=keepdim)


@lower("amin")
def amin(self: Any, dim: Any = (), keepdim: bool = False) -> Any:
    return jnp.min(self, axes(dim), keepdims=keepdim)


@lower("max")
def max_(self: Any) -> Any:
    return jnp.max(self)


@lower("min")
def min_(self: Any) -> Any:
    return jnp.min(self)


@lower("var.correction")
def var(self: Any, dim: Any = None, *, correction: Any = 1, keepdim: bool = False) -> Any:
    return jnp.var(self, axes(dim), ddof=1 if correction is None else correction, keepdims=keepdim)


@lower("linalg_vector_norm", static=("ord",))
def linalg_vector_norm(self: Any, ord: Any = 2, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
    magnitude = jnp.abs(self).astype(dtype)
    if ord == float("inf"):
        return jnp.max(magnitude, axes(dim), keepdims=keepdim)
    if ord == -float("inf"):
        return jnp.min(magnitude, axes(dim), keepdims=keepdim)
    if ord == 0:
        return jnp.sum((magnitude != 0).astype(dtype), axes(dim), keepdims=keepdim)
    if ord == 1:
        return jnp.sum(magnitude, axes(dim), keepdims=keepdim)
    if ord == 2:
        return jnp.sqrt(jnp.sum(magnitude * magnitude, axes(dim), keepdims=keepdim))
    return jnp.sum(magnitude**ord, axes(dim), keepdims=keepdim) ** (1.0 / ord)


@lower("argmax")
def argmax(self: Any, dim: Any = None, keepdim: bool = False) -> Any:
    return jnp.argmax(self, dim, keepdims=keepdim)


@lower("argmin")
def argmin(self: Any, dim: Any = None, keepdim: bool = False) -> Any:
    return jnp.argmin(self, dim, keepdims=keepdim)
