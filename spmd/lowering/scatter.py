"""Scatter: every element of a source is written to, or combined with, the element at its index along one dim.

The other dims are batch dims of one scatter (by `vmap`) instead of index columns, so that they can stay sharded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from spmd.lowering._registry import lower
from spmd.lowering.index import combined_at, require_source_shape, slices

Combine = Callable[[Any, str, Any], Any]  # (base, name of the method of `.at[...]`, values) -> base with the values combined in


def scattered(self: Any, dim: int, index: Any, source: Any, method: str) -> Any:
    """`self` with `source` (array or number) combined at `index` along `dim` by `method` of jax's `.at[...]`."""
    if index.size == 0:
        return self
    shape = self.shape
    if self.ndim == 0:
        self = self.reshape(1)
    dim = dim % self.ndim
    index = index.reshape(-1) if index.ndim == 0 else index
    source = jnp.asarray(source).astype(self.dtype)
    if source.ndim == 0:
        source = jnp.broadcast_to(source, index.shape)
    source = source[tuple(slice(0, n) for n in index.shape)]
    missing = [(0, 0 if i == dim else n - m) for i, (n, m) in enumerate(zip(self.shape, index.shape, strict=True))]
    if any(after for _, after in missing):  # batch dims must agree: pad with an index that is dropped
        index = jnp.pad(index, missing, constant_values=self.shape[dim])
        source = jnp.pad(source, missing)
    along: Callable[..., Any] = lambda x, i, s: combined_at(x.at[i], method, s)  # noqa: E731
    for _ in range(dim + 1, self.ndim):
        along = jax.vmap(along, in_axes=-1, out_axes=-1)
    for _ in range(dim):
        along = jax.vmap(along)
    return along(self, index, source).reshape(shape)


@lower("scatter.src", "scatter.value")
def scatter(self: Any, dim: int, index: Any, src: Any) -> Any:
    return scattered(self, dim, index, src, "set")


@lower("scatter.reduce", "scatter.value_reduce")
def scatter_with(self: Any, dim: int, index: Any, src: Any, *, reduce: str) -> Any:
    return scattered(self, dim, index, src, {"add": "add", "multiply": "multiply"}[reduce])


@lower("scatter_add")
def scatter_add(self: Any, dim: int, index: Any, src: Any) -> Any:
    return scattered(self, dim, index, src, "add")


@lower("scatter_reduce.two")
def scatter_reduce(self: Any, dim: int, index: Any, src: Any, reduce: str, *, include_self: bool = True) -> Any:
    def combine(base: Any, method: str, values: Any) -> Any:
        return scattered(base, dim, index, values, method)

    return _reduced(self, src, combine, reduce, include_self)


def _require_index_per_slice(self: Any, dim: int, index: Any, source: Any, reduce: str, *, include_self: bool = True) -> None:
    if reduce not in ("prod", "mean", "amax", "amin"):
        raise RuntimeError(f"index_reduce(): Expected reduce to be one of prod, mean, amax or amin but got {reduce}.")
    require_source_shape(self, dim, index, source)
    dim = dim % max(source.ndim, 1)
    count = source.shape[dim] if source.ndim else 1
    if index.size != count:
        what = f"Number of indices ({index.size}) should be equal to source.size(dim): ({count}), for dim: {dim}"
        raise RuntimeError(f"index_reduce_(): {what}")


@lower("index_reduce", check=_require_index_per_slice)
def index_reduce(self: Any, dim: int, index: Any, source: Any, reduce: str, *, include_self: bool = True) -> Any:
    def combine(base: Any, method: str, values: Any) -> Any:
        values = values.reshape(-1) if base.ndim == 0 else values
        return combined_at(slices(base, dim, index), method, values).reshape(base.shape)

    return _reduced(self, source, combine, reduce, include_self)


_METHODS = {"sum": "add", "mean": "add", "prod": "multiply", "amin": "min", "amax": "max"}


def _reduced(self: Any, source: Any, combine: Combine, reduce: str, include_self: bool) -> Any:
    base = self
    if not include_self:
        touched = combine(jnp.zeros(self.shape, jnp.int32), "max", jnp.ones(source.shape, jnp.int32)) > 0
        base = jnp.where(touched, jnp.asarray(_identity(reduce, self.dtype), self.dtype), self)
    total = combine(base, _METHODS[reduce], source)
    if reduce != "mean":
        return total
    count = combine(jnp.full(self.shape, int(include_self), self.dtype), "add", jnp.ones(source.shape, self.dtype))
    count = jnp.maximum(count, 1)
    return total // count if jnp.issubdtype(self.dtype, jnp.integer) else total / count


def _identity(reduce: str, dtype: Any) -> Any:
    """The value that leaves a reduction unchanged."""
    if reduce in ("sum", "mean", "prod"):
        return int(reduce == "prod")
    if dtype == jnp.bool_:
        return reduce == "amin"
    if jnp.issubdtype(dtype, jnp.floating):
        return float("inf") if reduce == "amin" else -float("inf")
    return jnp.iinfo(dtype).max if reduce == "amin" else jnp.iinfo(dtype).min
