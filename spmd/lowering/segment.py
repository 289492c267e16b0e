"""Reductions over consecutive runs of rows of different lengths."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from spmd.lowering._registry import is_static, lower

_START = {"sum": 0.0, "mean": 0.0, "prod": 1.0, "max": -float("inf"), "min": float("inf")}
_METHODS = {"sum": "add", "mean": "add", "prod": "multiply", "max": "max", "min": "min"}


def _reduced(data: Any, reduce: str, lengths: Any, initial: Any) -> Any:
    """One row per segment; data [rows, ...], lengths [segments]."""
    num_segments, rows = lengths.shape[0], data.shape[0]
    start = jnp.asarray(_START[reduce] if initial is None else initial, data.dtype)
    segments = jnp.searchsorted(jnp.cumsum(lengths), jnp.arange(rows), side="right")
    base = jnp.broadcast_to(start, (num_segments, *data.shape[1:]))
    out = getattr(base.at[segments], _METHODS[reduce])(data, mode="drop")
    if reduce != "mean":
        return out
    counts = lengths.reshape(-1, *(1,) * (data.ndim - 1))
    empty = jnp.asarray(jnp.nan if initial is None else start, data.dtype)
    return jnp.where(counts > 0, out / jnp.maximum(counts, 1).astype(data.dtype), empty)


def _batched(data: Any, reduce: str, lengths: Any, offsets: Any, axis: int, initial: Any) -> Any:
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
    if reduce in ("max", "min") and initial is not None and is_static(initial):
        initial = float(initial)
    return jax.vjp(lambda x: _batched(x, reduce, lengths, offsets, axis, initial), data)[1](grad)[0]
