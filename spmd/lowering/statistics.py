"""Order statistics and counts: median, mode, histograms."""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from spmd.base._convert import cast
from spmd.lowering._arithmetic import quotient
from spmd.lowering._registry import assumed, lower, size_if_traced
from spmd.lowering.create import linspace
from spmd.lowering.reduce import nonempty_dim_check
from spmd.lowering.sort import sorted_with_indices


def _is_nan(x: Any) -> Any:
    return jnp.isnan(x) if jnp.issubdtype(x.dtype, jnp.inexact) else jnp.zeros(x.shape, bool)


def _lower_median(self: Any, dim: int, ignores_nan: bool) -> tuple[Any, Any]:
    """(lower of the two middle elements, its position). If an element is NaN, so is the median, unless `ignores_nan`."""
    values, order = sorted_with_indices(self, dim)
    count = self.shape[dim]
    num_nan = jnp.sum(_is_nan(values), dim, keepdims=True)
    if ignores_nan:
        middle = jnp.maximum(count - num_nan - 1, 0) // 2
    else:
        middle = jnp.where(num_nan > 0, count - num_nan, (count - 1) // 2)
    return jnp.take_along_axis(values, middle, dim), jnp.take_along_axis(order, middle, dim)


def _along(self: Any, dim: int, keepdim: bool, pick: Any) -> Any:
    """`pick(self, dim)`, which returns (values, positions), without the dim unless `keepdim`. A 0-dim tensor is its own result."""
    if self.ndim == 0:
        return self, jnp.zeros((), jnp.int64)
    values, positions = pick(self, dim % self.ndim)
    return (values, positions) if keepdim else (jnp.squeeze(values, dim), jnp.squeeze(positions, dim))


@lower("median.dim", check=nonempty_dim_check("median"))
def median_dim(self: Any, dim: int, keepdim: bool = False) -> Any:
    return _along(self, dim, keepdim, lambda x, d: _lower_median(x, d, False))


@lower("nanmedian.dim", check=nonempty_dim_check("nanmedian"))
def nanmedian_dim(self: Any, dim: int, keepdim: bool = False) -> Any:
    return _along(self, dim, keepdim, lambda x, d: _lower_median(x, d, True))


@lower("median")
def median(self: Any) -> Any:
    return _empty_median(self) if self.size == 0 else _lower_median(self.reshape(-1), 0, False)[0][0]


@lower("nanmedian")
def nanmedian(self: Any) -> Any:
    return _empty_median(self) if self.size == 0 else _lower_median(self.reshape(-1), 0, True)[0][0]


def _empty_median(self: Any) -> Any:
    return cast(jnp.full((), jnp.nan, jnp.float32), self.dtype)


@lower("mode", check=nonempty_dim_check("mode"))
def mode(self: Any, dim: int = -1, keepdim: bool = False) -> Any:
    """(most frequent value, its last position); if several are equally frequent, the smallest of them."""
    return _along(self, dim, keepdim, _most_frequent)


def _most_frequent(self: Any, dim: int) -> tuple[Any, Any]:
    values, order = sorted_with_indices(self, dim)
    position = lax.broadcasted_iota(jnp.int64, self.shape, dim)
    differs = lax.slice_in_dim(values, 1, None, axis=dim) != lax.slice_in_dim(values, 0, -1, axis=dim)
    is_first = jnp.concatenate([jnp.ones_like(lax.slice_in_dim(position, 0, 1, axis=dim), bool), differs], dim)
    run_length = position - lax.cummax(jnp.where(is_first, position, 0), dim)
    best = jnp.argmax(run_length, dim, keepdims=True)
    return jnp.take_along_axis(values, best, dim), jnp.take_along_axis(order, best, dim)


@lower("histc")
def histc(self: Any, bins: int = 100, min: Any = 0, max: Any = 0) -> Any:
    """Counts in `bins` equal bins of [min, max], or of the range of the data if both are equal. Elements outside are not counted."""
    x = self.reshape(-1)
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    low, high = jnp.asarray(min, wide.dtype), jnp.asarray(max, wide.dtype)
    if x.size:
        low, high = jnp.where(low == high, jnp.min(wide), low), jnp.where(low == high, jnp.max(wide), high)
    low, high = jnp.where(low == high, low - 1, low), jnp.where(low == high, high + 1, high)
    index = jnp.floor(quotient((wide - low) * bins, high - low)).astype(jnp.int64)
    inside = (wide >= low) & (wide <= high)
    counts = jnp.zeros(bins, wide.dtype).at[jnp.where(inside, jnp.clip(index, 0, bins - 1), bins)].add(1, mode="drop")
    return counts.astype(self.dtype)


def _require_weight_per_value(self: Any, weights: Any = None, minlength: int = 0) -> None:
    if minlength < 0:
        raise RuntimeError("minlength should be >= 0")
    if weights is not None and weights.shape != self.shape:
        raise RuntimeError("weights should be 1-d and have the same length as input")


@lower("bincount", data_dependent=True, check=_require_weight_per_value)
def bincount(self: Any, weights: Any = None, minlength: int = 0) -> Any:
    """If the values are unknown, the length is assumed to be `minlength`: metrics pass the number of classes."""
    if self.ndim != 1:
        raise RuntimeError(_NO_COUNTS)
    length = minlength
    if self.size and not (minlength and _is_assumed_below(self, minlength)):
        known = size_if_traced(self, lambda: _num_bins(self, minlength))
        length = int(_num_bins(self, minlength)) if known is None else known
        if length < 0:
            raise RuntimeError(_NO_COUNTS)
    if weights is None or not self.size:
        return jnp.zeros(length, jnp.int64).at[self].add(1)
    dtype = jnp.float32 if weights.dtype == jnp.float32 else jnp.float64
    return jnp.zeros(length, dtype).at[self].add(weights.astype(dtype))


_NO_COUNTS = "bincount only supports 1-d non-negative integral inputs."


def _num_bins(values: Any, minlength: int) -> Any:
    """The length of `bincount`; -1 if a value is negative."""
    return jnp.where(values.min() < 0, -1, jnp.maximum(values.max().astype(jnp.int64) + 1, minlength))


def _is_assumed_below(values: Any, length: int) -> bool:
    wide = values.astype(jnp.int64)
    return assumed(
        lambda: jnp.any((wide < 0) | (wide >= length)),
        f"bincount(x, minlength={length}) has {length} elements in a program, and x contains a value outside [0, {length})",
        f"pass the number of bins: torch.bincount(x, minlength=n); or call it on x.clamp(0, {length - 1})",
    )


def _counts(points: Any, edges: list[Any], weight: Any, density: bool) -> Any:
    """Counts of the points [N, D] in the cells between the edges of D dims. The last edge belongs to the last cell."""
    sizes = tuple(e.shape[0] - 1 for e in edges)
    flat = jnp.zeros(points.shape[0], jnp.int64)
    inside = jnp.ones(points.shape[0], bool)
    for d, edge in enumerate(edges):
        x = points[:, d]
        cell = jnp.searchsorted(edge, x, side="right") - 1
        flat = flat * sizes[d] + jnp.clip(jnp.where(x == edge[-1], sizes[d] - 1, cell), 0, sizes[d] - 1)
        inside &= (x >= edge[0]) & (x <= edge[-1])
    share = jnp.ones(points.shape[0], points.dtype) if weight is None else weight.reshape(-1).astype(points.dtype)
    counts = jnp.zeros(math.prod(sizes), points.dtype).at[flat].add(jnp.where(inside, share, 0)).reshape(sizes)
    if density:
        counts = counts / jnp.sum(counts)
        for d, edge in enumerate(edges):
            counts = counts / jnp.diff(edge).reshape([-1 if i == d else 1 for i in range(len(edges))])
    return counts


def _edges(points: Any, bins: tuple[int, ...], range: tuple[float, ...] | None) -> list[Any]:
    found: list[Any] = []
    for d, count in enumerate(bins):
        if range:
            low, high = (jnp.asarray(r, points.dtype) for r in range[2 * d : 2 * d + 2])
        elif points.shape[0]:
            low, high = jnp.min(points[:, d]), jnp.max(points[:, d])
        else:
            low, high = jnp.zeros((), points.dtype), jnp.ones((), points.dtype)
        same = low == high
        found.append(linspace(jnp.where(same, low - 0.5, low), jnp.where(same, high + 0.5, high), count + 1, dtype=points.dtype))
    return found


@lower("histogram.bin_ct")
def histogram_bin_ct(self: Any, bins: int = 100, *, range: Any = None, weight: Any = None, density: bool = False) -> Any:
    points = self.reshape(-1, 1)
    edges = _edges(points, (bins,), range)
    return _counts(points, edges, weight, density), edges[0]


@lower("histogram.bins_tensor")
def histogram_bins_tensor(self: Any, bins: Any, *, weight: Any = None, density: bool = False) -> Any:
    return _counts(self.reshape(-1, 1), [bins], weight, density), bins


def _require_bins_per_dim(self: Any, bins: Any, **rest: Any) -> None:
    if self.ndim and len(bins) != self.shape[-1]:
        raise RuntimeError("histogramdd: The size of bins must be equal to the innermost dimension of the input.")


@lower("_histogramdd_bin_edges", check=_require_bins_per_dim)
def _histogramdd_bin_edges(self: Any, bins: Any, *, range: Any = None, weight: Any = None, density: bool = False) -> Any:
    return _edges(self.reshape(-1, self.shape[-1]), bins, range)


@lower("_histogramdd_from_bin_cts", check=_require_bins_per_dim)
def _histogramdd_from_bin_cts(self: Any, bins: Any, *, range: Any = None, weight: Any = None, density: bool = False) -> Any:
    points = self.reshape(-1, self.shape[-1])
    return _counts(points, _edges(points, bins, range), weight, density)


@lower("_histogramdd_from_bin_tensors", check=_require_bins_per_dim)
def _histogramdd_from_bin_tensors(self: Any, bins: Any, *, weight: Any = None, density: bool = False) -> Any:
    return _counts(self.reshape(-1, self.shape[-1]), list(bins), weight, density)


@lower("hash_tensor")
def hash_tensor(self: Any, dim: Any = (), *, keepdim: bool = False, mode: int = 0) -> Any:
    """Exclusive or of the bits of the elements, as float64 or int64. torch has no other mode."""
    wide = self.astype(jnp.float64 if jnp.issubdtype(self.dtype, jnp.floating) else jnp.int64)
    axis = tuple(range(self.ndim)) if not dim else tuple(d % self.ndim for d in dim if self.ndim)
    out = lax.reduce(lax.bitcast_convert_type(wide, jnp.uint64), np.uint64(0), lax.bitwise_xor, axis)
    return jnp.expand_dims(out, axis) if keepdim else out
