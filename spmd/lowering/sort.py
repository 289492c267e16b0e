"""Sorting, the k largest elements, and search in sorted sequences. NaN counts as larger than every number, as in torch."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from spmd.base._open_sizes import are_sizes_open
from spmd.lowering._registry import lower

_MAX_BISECTIONS = 32  # for a sequence of any length


def sorted_with_indices(x: Any, dim: int, descending: bool = False) -> tuple[Any, Any]:
    """(values, indices) along `dim`, stable in both directions."""
    if x.ndim == 0:
        return x, jnp.zeros((), jnp.int64)
    dim = dim % x.ndim
    indices = lax.broadcasted_iota(jnp.int64, x.shape, dim)
    if descending:  # sort the reversed tensor and reverse the result: equal elements keep their order
        x, indices = lax.rev(x, (dim,)), lax.rev(indices, (dim,))
    values, indices = lax.sort((x, indices), dimension=dim, is_stable=True, num_keys=1)
    return (lax.rev(values, (dim,)), lax.rev(indices, (dim,))) if descending else (values, indices)


@lower("sort")
def sort(self: Any, dim: int = -1, descending: bool = False) -> Any:
    return sorted_with_indices(self, dim, descending)


@lower("sort.stable")
def sort_stable(self: Any, *, stable: bool | None, dim: int = -1, descending: bool = False) -> Any:
    return sorted_with_indices(self, dim, descending)


@lower("argsort.stable", whole=True)
def argsort_stable(self: Any, *, stable: bool, dim: int = -1, descending: bool = False) -> Any:
    return sorted_with_indices(self, dim, descending)[1]


@lower("topk")
def topk(self: Any, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> Any:
    if self.ndim == 0:
        return (self, jnp.zeros((), jnp.int64)) if k else (jnp.zeros((0,), self.dtype), jnp.zeros((0,), jnp.int64))
    dim = dim % self.ndim
    if largest and dim == self.ndim - 1 and self.dtype != jnp.bool_ and k > 0:
        values, indices = lax.top_k(self, k)
        return values, indices.astype(jnp.int64)
    values, indices = sorted_with_indices(self, dim, largest)
    return lax.slice_in_dim(values, 0, k, axis=dim), lax.slice_in_dim(indices, 0, k, axis=dim)


@lower("kthvalue")
def kthvalue(self: Any, k: int, dim: int = -1, keepdim: bool = False) -> Any:
    if self.ndim == 0:
        return self, jnp.zeros((), jnp.int64)
    values, indices = sorted_with_indices(self, dim)
    values, indices = (lax.slice_in_dim(a, k - 1, k, axis=dim % self.ndim) for a in (values, indices))
    return (values, indices) if keepdim else (jnp.squeeze(values, dim), jnp.squeeze(indices, dim))


def _search(sequence: Any, values: Any, right: bool, side: str | None, out_int32: bool) -> Any:
    """torch's bisection with its comparisons, so that NaN (in the values or in the sequence) gives the same index."""
    dtype = jnp.result_type(sequence, values)
    sequence, values, length = sequence.astype(dtype), values.astype(dtype), sequence.shape[0]
    is_left = (side or ("right" if right else "left")) == "left"

    def half(_: Any, bounds: tuple[Any, Any]) -> tuple[Any, Any]:
        low, high = bounds
        middle = (low + high) // 2
        at = jnp.take(sequence, jnp.minimum(middle, length - 1), mode="clip")
        is_before = ~(at >= values) if is_left else ~(at > values)
        is_open = low < high
        return jnp.where(is_open & is_before, middle + 1, low), jnp.where(is_open & ~is_before, middle, high)

    indices = jnp.zeros(values.shape, jnp.int64)
    if sequence.size:
        steps = _MAX_BISECTIONS if are_sizes_open() else length.bit_length()
        indices = lax.fori_loop(0, steps, half, (indices, jnp.full(values.shape, length, jnp.int64)))[0]
    return indices.astype(jnp.int32 if out_int32 else jnp.int64)


@lower("searchsorted.Tensor", "searchsorted.Scalar")
def searchsorted(
    sorted_sequence: Any, self: Any, *, out_int32: bool = False, right: bool = False, side: str | None = None, sorter: Any = None
) -> Any:
    """`self` contains the values. With more than one dim, each row is searched in the same row of the sequence."""
    values = jnp.asarray(self)
    if sorter is not None:
        sorted_sequence = jnp.take_along_axis(sorted_sequence, sorter, axis=-1)
    if sorted_sequence.ndim == 1 or values.size == 0:
        return _search(sorted_sequence, values, right, side, out_int32)
    *batch, length = sorted_sequence.shape
    found = jax.vmap(lambda s, v: _search(s, v, right, side, out_int32))(
        sorted_sequence.reshape(-1, length), values.reshape(-1, values.shape[-1])
    )
    return found.reshape(*batch, values.shape[-1])


def _require_one_dim(self: Any, boundaries: Any, **_: Any) -> None:
    if boundaries.ndim != 1:
        raise RuntimeError(f"boundaries tensor must be 1 dimension, but got dim({boundaries.ndim})")


@lower("bucketize.Tensor", "bucketize.Scalar", check=_require_one_dim)
def bucketize(self: Any, boundaries: Any, *, out_int32: bool = False, right: bool = False) -> Any:
    return _search(boundaries, jnp.asarray(self), right, None, out_int32)
