"""Looking elements up by index, and adding back to where they came from."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from spmd.lowering._registry import lower


@lower("embedding")
def embedding(weight: Any, indices: Any, padding_idx: int = -1, scale_grad_by_freq: bool = False, sparse: bool = False) -> Any:
    return jnp.take(weight, indices, axis=0, mode="clip")


@lower("embedding_dense_backward")
def embedding_dense_backward(grad_output: Any, indices: Any, num_weights: int, padding_idx: int, scale_grad_by_freq: bool) -> Any:
    width = grad_output.shape[-1]
    rows, ids = grad_output.reshape(-1, width), indices.reshape(-1)
    if scale_grad_by_freq:
        counts = jnp.zeros((num_weights,), rows.dtype).at[ids].add(1)
        rows = rows / counts[ids][:, None]
    if padding_idx >= 0:
        rows = jnp.where((ids != padding_idx)[:, None], rows, jnp.zeros((), rows.dtype))
    return jnp.zeros((num_weights, width), rows.dtype).at[ids].add(rows)


@lower("gather")
def gather(self: Any, dim: int, index: Any, *, sparse_grad: bool = False) -> Any:
    if self.ndim == 0:
        return jnp.broadcast_to(self, index.shape)
    window = tuple(slice(0, n) if i != dim % self.ndim else slice(None) for i, n in enumerate(index.shape))
    return jnp.take_along_axis(self[window], index, dim, mode="clip")
