"""Reductions over consecutive segments of rows of different lengths."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from spmd.lowering._registry import lower

_START = {"sum": 0.0, "mean": 0.0, "prod": 1.0, "max": -float("inf"), "min": float("inf")}
_METHODS = {"sum": "add", "mean": "add", "prod": "multiply", "max": "max", "min": "min"}


def _reduced(data: Any, reduce: str, lengths: Any, initial: Any) -> Any:
    """One row per segment; data [rows, ...], lengths [segments]."""
    num_segments, rows = lengths.shape[0], data.shape[0]
    start = jnp.asarray(_START[reduce] if initial is None else initial, data.dtype)
    segments = _segments(lengths, rows)
    base = jnp.broadcast_to(start, (num_segments, *data.shape[1:]))
    out = getattr(base.at[segments], _METHODS[reduce])(data, mode="drop")
    if reduce != "mean":
        return out
    counts = lengths.reshape(-1, *(1,) * (data.ndim - 1))
    empty = jnp.asarray(jnp.nan if initial is None else start, data.dtype)
    return jnp.where(counts > 0, out / jnp.maximum(counts, 1).astype(data.dtype), empty)


def _segments(lengths: Any, rows: int) -> Any:
    """Index of the segment of each row."""
    return jnp.searchsorted(jnp.cumsum(lengths), jnp.arange(rows), side="right")


def _prod_gradient(grad: Any, data: Any, lengths: Any, initial: Any) -> Any:
    """The gradient of each row is the product of the others, also if some are zero. jax has no gradient of this scatter."""
    segments = _segments(lengths, data.shape[0])
    is_zero = data == 0
    of_nonzero = _reduced(jnp.where(is_zero, 1, data), "prod", lengths, initial).at[segments].get(mode="clip")
    num_zeros = _reduced(is_zero.astype(data.dtype), "sum", lengths, None).at[segments].get(mode="clip")
    others = jnp.where(is_zero, jnp.where(num_zeros == 1, of_nonzero, 0), jnp.where(num_zeros == 0, of_nonzero / data, 0))
    return grad.at[segments].get(mode="fill", fill_value=0) * others


def _batched(data: Any, reduce: str, lengths: Any, offsets: Any, axis: int, initial: Any) -> Any:
    """The reduction along `axis`, batched over the dims before it. If `lengths` is None, `offsets` are the bounds of the segments."""
    lengths = jnp.diff(offsets, axis=-1) if lengths is None else lengths

    def along(rows: Any, counts: Any) -> Any:
        return _reduced(rows, reduce, counts, initial)

    for _ in range(axis):
        along = jax.vmap(along)
    return along(data, lengths)


@lower("segment_reduce")
def segment_reduce(
    data: Any,
    reduce: str,
    *,
    lengths: Any = None,
    indices: Any = None,
    offsets: Any = None,
    axis: int = 0,
    unsafe: bool = False,
    initial: Any = None,
) -> Any:
    return _batched(data, reduce, lengths, offsets, axis, initial)


@lower("_segment_reduce_backward")
def _segment_reduce_backward(
    grad: Any, output: Any, data: Any, reduce: str, *, lengths: Any = None, offsets: Any = None, axis: int = 0, initial: Any = None
) -> Any:
    if reduce == "prod":
        lengths = jnp.diff(offsets, axis=-1) if lengths is None else lengths

        def along(of_output: Any, rows: Any, counts: Any) -> Any:
            return _prod_gradient(of_output, rows, counts, initial)

        for _ in range(axis):
            along = jax.vmap(along)
        return along(grad, data, lengths)
    return jax.vjp(lambda x: _batched(x, reduce, lengths, offsets, axis, initial), data)[1](grad)[0]
