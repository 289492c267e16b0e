"""Embeddings: rows of a table selected by id, one by one or reduced over bags of ids."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from spmd.base._errors import UnsupportedOpError, called_at, message
from spmd.lowering._registry import lower
from spmd.lowering.matmul import is_narrower

_SUM, _MEAN, _MAX = 0, 1, 2


@lower("embedding")
def embedding(weight: Any, indices: Any, padding_idx: int = -1, scale_grad_by_freq: bool = False, sparse: bool = False) -> Any:
    return jnp.take(weight, indices, axis=0, mode="clip")


@lower("embedding_dense_backward", told=("reduce_dtype",))
def embedding_dense_backward(
    grad_output: Any, indices: Any, num_weights: int, padding_idx: int, scale_grad_by_freq: bool, reduce_dtype: Any = None
) -> Any:
    if is_narrower(grad_output, reduce_dtype):
        grad_output = grad_output.astype(reduce_dtype)
    rows = grad_output  # not flattened: the dims of the ids may be sharded over different axes
    if scale_grad_by_freq:
        rows = rows / _frequency(indices, num_weights, rows.dtype)[..., None]
    if padding_idx >= 0:
        rows = jnp.where((indices != padding_idx)[..., None], rows, jnp.zeros((), rows.dtype))
    return jnp.zeros((num_weights, rows.shape[-1]), rows.dtype).at[indices].add(rows)


def _frequency(ids: Any, num_weights: int, dtype: Any) -> Any:
    """For each id, the number of its occurrences in `ids`."""
    return jnp.zeros((num_weights,), dtype).at[ids].add(1)[ids]


@lower("embedding_renorm")
def embedding_renorm(self: Any, indices: Any, max_norm: float, norm_type: float) -> Any:
    """Scale the used rows whose norm exceeds `max_norm` down to it."""
    used = jnp.zeros((self.shape[0],), bool).at[indices.reshape(-1)].set(True)
    length = jnp.linalg.norm(self, norm_type, axis=1)
    factor = jnp.where(used & (length > max_norm), max_norm / (length + 1e-7), 1.0)
    return self * factor.astype(self.dtype)[:, None]


@lower("_embedding_bag", "_embedding_bag_forward_only")
def _embedding_bag(
    weight: Any,
    indices: Any,
    offsets: Any,
    scale_grad_by_freq: bool = False,
    mode: int = _SUM,
    sparse: bool = False,
    per_sample_weights: Any = None,
    include_last_offset: bool = False,
    padding_idx: int = -1,
) -> Any:
    """(output [bags, width], bag of each id, ids per bag, and for mode `max` the id whose row has the largest element)."""
    if indices.dtype not in (jnp.int32, jnp.int64):  # 8 bits cannot count the ids
        indices = indices.astype(jnp.int64)
    num_bags = offsets.shape[0] - 1 if include_last_offset else offsets.shape[0]
    starts = offsets[:num_bags]
    bags = (jnp.searchsorted(starts, jnp.arange(indices.shape[0], dtype=starts.dtype), side="right") - 1).astype(indices.dtype)
    kept = indices != padding_idx if padding_idx >= 0 else jnp.ones(indices.shape, bool)
    sizes = jnp.zeros((num_bags,), indices.dtype).at[bags].add(kept.astype(indices.dtype))
    rows = jnp.take(weight, indices, axis=0, mode="clip")
    width = weight.shape[1]
    if mode == _MAX:
        lowest = jnp.full((num_bags, width), -jnp.inf, weight.dtype)
        out = lowest.at[bags].max(jnp.where(kept[:, None], rows, -jnp.inf))
        wins = kept[:, None] & (rows == out[bags])
        positions = jnp.arange(indices.shape[0], dtype=indices.dtype)[:, None]
        first = jnp.full((num_bags, width), indices.shape[0], indices.dtype).at[bags].min(jnp.where(wins, positions, indices.shape[0]))
        winners = jnp.where(sizes[:, None] > 0, jnp.take(indices, first, mode="clip") if indices.size else first, -1)
        return jnp.where(sizes[:, None] > 0, out, 0), bags, sizes, winners
    if per_sample_weights is not None:
        rows = rows * per_sample_weights[:, None]
    rows = jnp.where(kept[:, None], rows, jnp.zeros((), rows.dtype))
    out = jnp.zeros((num_bags, width), weight.dtype).at[bags].add(rows)
    if mode == _MEAN:
        out = out / jnp.maximum(sizes, 1).astype(out.dtype)[:, None]
    return out, bags, sizes, jnp.zeros((0,), indices.dtype)


def _refuse_sparse(
    grad: Any,
    indices: Any,
    offsets: Any,
    bags: Any,
    sizes: Any,
    winners: Any,
    rows: int,
    by_freq: bool,
    mode: int,
    sparse: bool,
    *rest: Any,
) -> None:
    """Refuse `sparse=True`. The gradient here is dense, and optimizers treat a dense gradient differently from a sparse one."""
    if sparse:
        what = "the gradient of embedding_bag(sparse=True) is a sparse tensor: device 'jax' has only dense tensors"
        raise UnsupportedOpError(message(what, *called_at(), fix="sparse=False"))


@lower("_embedding_bag_backward", check=_refuse_sparse)
def _embedding_bag_backward(
    grad: Any,
    indices: Any,
    offsets: Any,
    offset2bag: Any,
    bag_size: Any,
    maximum_indices: Any,
    num_weights: int,
    scale_grad_by_freq: bool,
    mode: int,
    sparse: bool,
    per_sample_weights: Any,
    padding_idx: int = -1,
) -> Any:
    return _embedding_bag_dense_backward(
        grad, indices, offset2bag, bag_size, maximum_indices, num_weights, scale_grad_by_freq, mode, per_sample_weights, padding_idx
    )


@lower("_embedding_bag_dense_backward")
def _embedding_bag_dense_backward(
    grad: Any,
    indices: Any,
    offset2bag: Any,
    bag_size: Any,
    maximum_indices: Any,
    num_weights: int,
    scale_grad_by_freq: bool,
    mode: int,
    per_sample_weights: Any,
    padding_idx: int = -1,
) -> Any:
    zeros = jnp.zeros((num_weights, grad.shape[1]), grad.dtype)
    if mode == _MAX:
        columns = jnp.broadcast_to(jnp.arange(grad.shape[1]), grad.shape)
        winners = jnp.where(maximum_indices < 0, num_weights, maximum_indices)
        return zeros.at[winners, columns].add(grad, mode="drop")
    rows = jnp.take(grad, offset2bag, axis=0, mode="clip")
    if mode == _MEAN:
        rows = rows / jnp.maximum(bag_size, 1).astype(rows.dtype)[offset2bag][:, None]
    if per_sample_weights is not None:
        rows = rows * per_sample_weights[:, None]
    if scale_grad_by_freq:
        rows = rows / _frequency(indices, num_weights, rows.dtype)[:, None]
    if padding_idx >= 0:
        rows = jnp.where((indices != padding_idx)[:, None], rows, jnp.zeros((), rows.dtype))
    return zeros.at[indices].add(rows)


@lower("_embedding_bag_per_sample_weights_backward")
def _embedding_bag_per_sample_weights_backward(
    grad: Any, weight: Any, indices: Any, offsets: Any, offset2bag: Any, mode: int, padding_idx: int = -1
) -> Any:
    out = jnp.sum(jnp.take(grad, offset2bag, axis=0, mode="clip") * jnp.take(weight, indices, axis=0, mode="clip"), axis=1)
    return jnp.where(indices != padding_idx, out, jnp.zeros((), out.dtype)) if padding_idx >= 0 else out
