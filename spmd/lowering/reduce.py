"""Reductions over dims: sums, extremes, moments and norms."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

from spmd.base._jax import rows_folded_from
from spmd.base._open_sizes import are_sizes_open
from spmd.lowering._registry import is_static, lower
from spmd.lowering.norm import wide


def axes(dim: Any, ndim: int = 1) -> tuple[int, ...] | None:
    """jax's axis argument for torch's `dim`: an int, a list of ints, or None or empty for all dims. A 0-dim tensor always gives None."""
    if dim is None or ndim == 0 or (isinstance(dim, tuple) and not dim):
        return None
    return (dim,) if isinstance(dim, int) else tuple(dim)


def accumulated_in(dtype: Any) -> Any:
    """The dtype to accumulate in: float32 for 16-bit floats. `jnp.sum(x, dtype=...)` accumulates in the dtype that it is given."""
    return jnp.float32 if dtype in (jnp.bfloat16, jnp.float16) else dtype


def _squeezed(x: Any, axis: tuple[int, ...] | None, keepdim: bool) -> Any:
    """`x`, computed with the reduced dims kept, without these dims unless `keepdim`."""
    return x if keepdim else jnp.squeeze(x, axis)


@lower("sum", "sum.dim_IntList", by_origin=True)
def sum_(self: Any, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
    """A sum of rows, such as the gradient of a bias, is a sum over the dims folded into the rows. See Note [Folded rows] in `matmul`."""
    if self.ndim == 2 and axes(dim, 2) == (0,) and not are_sizes_open() and (rows := rows_folded_from(self)) is not None:
        out = jnp.sum(rows, tuple(range(rows.ndim - 1)), dtype=accumulated_in(dtype))
        return out[None] if keepdim else out
    return jnp.sum(_truth_if_bool(self, dtype), axes(dim, self.ndim), dtype=accumulated_in(dtype), keepdims=keepdim)


def _truth_if_bool(self: Any, dtype: Any) -> Any:
    """Complex numbers that are reduced as bools: the conversion would drop the imaginary parts."""
    return self != 0 if dtype == jnp.bool_ and jnp.iscomplexobj(self) else self


@lower("nansum")
def nansum(self: Any, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
    return jnp.nansum(self, axes(dim, self.ndim), dtype=accumulated_in(dtype), keepdims=keepdim)


@lower("mean", "mean.dim")
def mean(self: Any, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
    return jnp.mean(self, axes(dim, self.ndim), dtype=accumulated_in(dtype), keepdims=keepdim)


@lower("prod")
def prod(self: Any, *, dtype: Any = None) -> Any:
    return jnp.prod(_truth_if_bool(self, dtype), dtype=accumulated_in(dtype))


@lower("prod.dim_int")
def prod_dim_int(self: Any, dim: int, keepdim: bool = False, *, dtype: Any = None) -> Any:
    return jnp.prod(_truth_if_bool(self, dtype), axes(dim, self.ndim), dtype=accumulated_in(dtype), keepdims=keepdim)


@lower("any", "any.dim", "any.dims")
def any_(self: Any, dim: Any = None, keepdim: bool = False) -> Any:
    truth = self != 0  # the conversion of a complex number would drop its imaginary part
    return truth if dim == () else jnp.any(truth, axes(dim, self.ndim), keepdims=keepdim)


@lower("all", "all.dim", "all.dims")
def all_(self: Any, dim: Any = None, keepdim: bool = False) -> Any:
    truth = self != 0
    return truth if dim == () else jnp.all(truth, axes(dim, self.ndim), keepdims=keepdim)


@lower("count_nonzero", "count_nonzero.dim_IntList")
def count_nonzero(self: Any, dim: Any = None) -> Any:
    return jnp.count_nonzero(self, axes(dim, self.ndim))


@lower("amax")
def amax(self: Any, dim: Any = (), keepdim: bool = False) -> Any:
    return jnp.max(self, axes(dim, self.ndim), keepdims=keepdim)


@lower("amin")
def amin(self: Any, dim: Any = (), keepdim: bool = False) -> Any:
    return jnp.min(self, axes(dim, self.ndim), keepdims=keepdim)


@lower("aminmax")
def aminmax(self: Any, *, dim: int | None = None, keepdim: bool = False) -> Any:
    return amin(self, dim, keepdim), amax(self, dim, keepdim)


def nonempty_check(name: str) -> Any:
    """A check for a reduction over all elements that has no result for an empty tensor."""

    def check(self: Any) -> None:
        if not self.size:
            what = "Expected reduction dim to be specified for input.numel() == 0. Specify the reduction dim with the 'dim' argument."
            raise RuntimeError(f"{name}(): {what}")

    return check


def nonempty_dim_check(name: str) -> Any:
    """A check for a reduction over one dim that has no result for an empty dim."""

    def check(self: Any, dim: int = -1, keepdim: bool = False) -> None:
        if self.ndim and not self.shape[dim]:
            raise IndexError(f"{name}(): Expected reduction dim {dim % self.ndim} to have non-zero size.")

    return check


@lower("max", check=nonempty_check("max"))
def max_(self: Any) -> Any:
    return jnp.max(self)


@lower("min", check=nonempty_check("min"))
def min_(self: Any) -> Any:
    return jnp.min(self)


@lower("argmax")
def argmax(self: Any, dim: int | None = None, keepdim: bool = False) -> Any:
    return jnp.argmax(self, None if self.ndim == 0 else dim, keepdims=keepdim)


@lower("argmin")
def argmin(self: Any, dim: int | None = None, keepdim: bool = False) -> Any:
    return jnp.argmin(self, None if self.ndim == 0 else dim, keepdims=keepdim)


@lower("max.dim", check=nonempty_dim_check("max"))
def max_dim(self: Any, dim: int, keepdim: bool = False) -> Any:
    return amax(self, dim, keepdim), argmax(self, dim, keepdim)


@lower("min.dim", check=nonempty_dim_check("min"))
def min_dim(self: Any, dim: int, keepdim: bool = False) -> Any:
    return amin(self, dim, keepdim), argmin(self, dim, keepdim)


def _moments(self: Any, dim: Any, correction: Any, keepdim: bool) -> tuple[Any, Any]:
    """(variance, mean). `correction` is subtracted from the count; None means 1."""
    axis = axes(dim, self.ndim)
    x = wide(self)
    average = jnp.mean(x, axis, keepdims=True)
    centred = x - average
    squares = jnp.sum(jnp.real(centred * jnp.conj(centred)), axis, keepdims=True)
    count = math.prod(self.shape[i] for i in (range(self.ndim) if axis is None else axis))
    correction = 1 if correction is None else correction
    divisor = max(count - correction, 0) if is_static(correction) else jnp.maximum(count - correction, 0)
    return _squeezed(squares / jnp.asarray(divisor, squares.dtype), axis, keepdim), _squeezed(average, axis, keepdim)


@lower("var.correction", static=("correction",))
def var(self: Any, dim: Any = None, *, correction: Any = None, keepdim: bool = False) -> Any:
    return _moments(self, dim, correction, keepdim)[0]


@lower("std.correction", static=("correction",))
def std(self: Any, dim: Any = None, *, correction: Any = None, keepdim: bool = False) -> Any:
    return jnp.sqrt(var(self, dim, correction=correction, keepdim=keepdim))


@lower("var_mean.correction", static=("correction",))
def var_mean(self: Any, dim: Any = None, *, correction: Any = None, keepdim: bool = False) -> Any:
    return _moments(self, dim, correction, keepdim)


@lower("std_mean.correction", static=("correction",))
def std_mean(self: Any, dim: Any = None, *, correction: Any = None, keepdim: bool = False) -> Any:
    variance, average = _moments(self, dim, correction, keepdim)
    return jnp.sqrt(variance), average


@lower("logsumexp")
def logsumexp(self: Any, dim: Any, keepdim: bool = False) -> Any:
    x = wide(self if jnp.issubdtype(self.dtype, jnp.inexact) else self.astype(jnp.float32))
    return jax.nn.logsumexp(x, axes(dim, self.ndim), keepdims=keepdim)


@lower("linalg_vector_norm", static=("ord",))
def linalg_vector_norm(self: Any, ord: Any = 2, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
    axis = axes(dim, self.ndim)
    magnitude = jnp.abs(wide(self))
    if dtype is not None and jnp.finfo(dtype).bits > jnp.finfo(magnitude.dtype).bits:
        magnitude = magnitude.astype(dtype)
    if ord == math.inf:
        return jnp.max(magnitude, axis, keepdims=keepdim, initial=0.0)
    if ord == -math.inf:
        return jnp.min(magnitude, axis, keepdims=keepdim)
    if ord == 0:
        return jnp.sum((magnitude != 0).astype(magnitude.dtype), axis, keepdims=keepdim)
    if ord == 1:
        return jnp.sum(magnitude, axis, keepdims=keepdim)
    if ord == 2:
        return jnp.sqrt(jnp.sum(magnitude * magnitude, axis, keepdims=keepdim))
    return jnp.sum(magnitude**ord, axis, keepdims=keepdim) ** (1.0 / ord)


@lower("norm.Scalar", "norm.ScalarOpt_dim", static=("p",))
def norm(self: Any, p: Any = 2, dim: Any = None, keepdim: bool = False) -> Any:
    return linalg_vector_norm(self, 2 if p is None else p, dim, keepdim)


@lower("norm.ScalarOpt_dim_dtype", static=("p",))
def norm_dim_dtype(self: Any, p: Any, dim: Any, keepdim: bool, *, dtype: Any) -> Any:
    return linalg_vector_norm(self.astype(dtype), 2 if p is None else p, dim, keepdim)


@lower("norm.ScalarOpt_dtype", static=("p",))
def norm_dtype(self: Any, p: Any, *, dtype: Any) -> Any:
    return linalg_vector_norm(self.astype(dtype), 2 if p is None else p)


@lower("dist", static=("p",))
def dist(self: Any, other: Any, p: Any = 2) -> Any:
    return linalg_vector_norm(self - other, p)


@lower("trace")
def trace(self: Any) -> Any:
    return jnp.trace(self)
