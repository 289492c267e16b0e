"""Unique values and nonzero positions: results whose shape depends on values. Counts in bins are in `statistics`."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax.numpy as jnp

from spmd.lowering._registry import lower, size_if_traced


@lower("nonzero", data_dependent=True)
def nonzero(self: Any) -> Any:
    if self.ndim == 0:
        return jnp.zeros((int(self != 0), 0), jnp.int64)
    return jnp.stack(jnp.nonzero(self, size=size_if_traced(self, lambda: jnp.count_nonzero(self))), axis=-1).astype(jnp.int64)


@lower("nonzero_static")
def nonzero_static(self: Any, *, size: int, fill_value: int = -1) -> Any:
    if self.ndim == 0:
        return jnp.zeros((size, 0), jnp.int64)
    if self.size == 0:
        return jnp.full((size, self.ndim), fill_value, jnp.int64)
    return jnp.stack(jnp.nonzero(self, size=size, fill_value=fill_value), axis=-1).astype(jnp.int64)


@lower("_unique", data_dependent=True)
def _unique(self: Any, sorted: bool = True, return_inverse: bool = False) -> Any:
    return _unique2(self, sorted, return_inverse)[:2]


@lower("_unique2", data_dependent=True)
def _unique2(self: Any, sorted: bool = True, return_inverse: bool = False, return_counts: bool = False) -> Any:
    values, inverse, counts = _distinct(self, None)
    return _requested(values, inverse.reshape(self.shape), counts, return_inverse, return_counts)


@lower("unique_dim", data_dependent=True)
def unique_dim(self: Any, dim: int, sorted: bool = True, return_inverse: bool = False, return_counts: bool = False) -> Any:
    if self.shape.count(0) > 1:
        raise RuntimeError("Number of zero sized dimensions is more than one, so unique cannot be applied ")
    if self.size == 0 and self.shape[dim]:
        raise RuntimeError("There are 0 sized dimensions, and they aren't selected, so unique cannot be applied")
    values, inverse, counts = _distinct(self, dim)
    return _requested(values, inverse.reshape(-1), counts, return_inverse, return_counts)


def _distinct(values: Any, dim: int | None) -> Any:
    """Distinct elements or slices along a dim, positions of all among them, and how often each occurs."""
    unique = partial(jnp.unique, values, axis=dim, return_inverse=True, return_counts=True, equal_nan=False)
    most = values.size if dim is None else values.shape[dim]
    return unique(size=size_if_traced(values, lambda: jnp.count_nonzero(unique(size=most)[2])))  # what fills up occurs 0 times


@lower("unique_consecutive", data_dependent=True)
def unique_consecutive(self: Any, return_inverse: bool = False, return_counts: bool = False, dim: int | None = None) -> Any:
    """One element per run of equal elements (of the flattened tensor), or one slice per run of equal slices along `dim`."""
    rows = self.reshape(-1) if dim is None else jnp.moveaxis(self, dim, 0)
    count = rows.shape[0]
    differs = jnp.any(rows[1:] != rows[:-1], axis=tuple(range(1, rows.ndim)))
    is_first = jnp.concatenate([jnp.ones((min(count, 1),), bool), differs])
    starts = jnp.nonzero(is_first, size=size_if_traced(is_first, lambda: jnp.count_nonzero(is_first)))[0]
    values = rows[starts] if dim is None else jnp.moveaxis(rows[starts], 0, dim)
    counts = jnp.diff(jnp.concatenate([starts, jnp.array([count])]))
    inverse = jnp.cumsum(is_first) - 1
    return _requested(values, inverse.reshape(self.shape) if dim is None else inverse, counts, return_inverse, return_counts)


@lower("unique_dim_consecutive", data_dependent=True)
def unique_dim_consecutive(self: Any, dim: int, return_inverse: bool = False, return_counts: bool = False) -> Any:
    return unique_consecutive(self, return_inverse, return_counts, dim)


def _requested(values: Any, inverse: Any, counts: Any, return_inverse: bool, return_counts: bool) -> Any:
    """The requested results; the others are empty tensors, as in torch."""
    nothing = jnp.zeros((0,), jnp.int64)
    return (
        values,
        inverse.astype(jnp.int64) if return_inverse else nothing,
        counts.astype(jnp.int64) if return_counts else nothing,
    )


def _without_output_size(repeats: Any, *, output_size: int | None = None) -> bool:
    return output_size is None


@lower("repeat_interleave.Tensor", data_dependent=_without_output_size)
def repeat_interleave(repeats: Any, *, output_size: int | None = None) -> Any:
    total = output_size
    if total is None:
        known = size_if_traced(repeats, lambda: _total(repeats))
        total = int(_total(repeats)) if known is None else known
    if total < 0:
        raise RuntimeError("repeats can not be negative")
    return jnp.repeat(jnp.arange(repeats.shape[0], dtype=repeats.dtype), repeats, total_repeat_length=total)


def _total(repeats: Any) -> Any:
    """The sum of all numbers; -1 if one is negative."""
    return jnp.where((repeats < 0).any(), -1, repeats.sum())
