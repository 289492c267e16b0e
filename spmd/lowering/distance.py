"""Distances between all pairs of rows of two matrices, or of one."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from spmd.lowering._registry import lower


@lower("_cdist_forward")
def _cdist_forward(x1: Any, x2: Any, p: float, compute_mode: int | None = None) -> Any:
    """p-norms of the differences between rows of `x1` [..., P, M] and rows of `x2` [..., R, M]: [..., P, R]."""
    difference = x1[..., :, None, :] - x2[..., None, :, :]
    if p == float("inf"):  # only for this norm does torch's CPU kernel ignore NaN
        difference = jnp.where(jnp.isnan(difference), 0, difference)
    return _norm(difference, p)


def _norm(difference: Any, p: float) -> Any:
    """p-norm over the last dim."""
    difference = jnp.abs(difference)
    if p == 0:
        return jnp.sum(jnp.where(jnp.isnan(difference), difference, difference != 0), axis=-1)
    if p == 1:
        return jnp.sum(difference, axis=-1)
    if p == float("inf"):
        return jnp.max(difference, axis=-1, initial=0)
    if p == 2:
        total = jnp.sum(difference * difference, axis=-1)
        return jnp.where(total == 0, 0, jnp.sqrt(jnp.where(total == 0, 1, total)))
    total = jnp.sum(jnp.where(difference == 0, 0, jnp.where(difference == 0, 1, difference) ** p), axis=-1)
    return jnp.where(total == 0, 0, jnp.where(total == 0, 1, total) ** (1 / p))


def _slope(difference: Any, grad: Any, distance: Any, p: float) -> Any:
    """Gradient of each difference, by the formulas of torch's CPU kernel.

    They differ from JAX's derivatives where a difference is 0, or where several are the largest: each of these has the whole gradient.
    """
    grad, distance = grad[..., None], distance[..., None]
    if p == 1:
        return grad * jnp.sign(difference)
    if p == float("inf"):
        return grad * jnp.sign(difference) * (1 - jnp.minimum(1, jnp.ceil(jnp.abs(jnp.abs(difference) - distance))))
    magnitude, length = jnp.abs(difference), jnp.where(distance == 0, 1, distance)
    if p == 2:
        slope = grad * difference / length
    elif p < 2:
        slope = jnp.sign(difference) * magnitude ** (p - 1) * grad / length ** (p - 1)
        slope = jnp.where(difference == 0, 0, slope) if p < 1 else slope
    else:
        slope = difference * magnitude ** (p - 2) * grad / length ** (p - 1)
    return jnp.where(distance == 0, 0, slope)


@lower("_cdist_backward")
def _cdist_backward(grad: Any, x1: Any, x2: Any, p: float, cdist: Any) -> Any:
    """Gradient of `x1`. A pair at distance zero contributes nothing."""
    if p == 0:
        return jnp.zeros_like(x1)
    return jnp.sum(_slope(x1[..., :, None, :] - x2[..., None, :, :], grad, cdist, p), axis=-2)


@lower("_pdist_forward")
def _pdist_forward(self: Any, p: float = 2) -> Any:
    """p-norms of the differences between each row of `self` [N, M] and each later row: [N * (N - 1) / 2]."""
    row, later = np.triu_indices(self.shape[0], 1)
    return _norm(self[row] - self[later], p)


@lower("_pdist_backward")
def _pdist_backward(grad: Any, self: Any, p: float, pdist: Any) -> Any:
    """Gradient of `self`. A pair at distance zero contributes nothing."""
    if p == 0:
        return jnp.zeros_like(self)
    row, later = np.triu_indices(self.shape[0], 1)
    slope = _slope(self[row] - self[later], grad, pdist, p)
    return jnp.zeros_like(self).at[row].add(slope).at[later].add(-slope)
