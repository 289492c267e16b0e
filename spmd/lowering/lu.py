"""LU factorisation with partial pivoting, and solve, inverse and determinant, which torch differentiates through it.

torch counts pivots from one, jax from zero. Rules take and return torch's pivots.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax

from spmd.lowering._registry import lower
from spmd.lowering.linalg import linalg_solve_triangular


def _factored(A: Any) -> tuple[Any, Any]:
    """(L and U in one matrix, pivots)."""
    if A.size == 0:
        return A, jnp.zeros((*A.shape[:-2], min(A.shape[-2:])), jnp.int32)
    packed, pivots, _ = lax.linalg.lu(A)
    return packed, pivots + 1


def _order(pivots: Any, rows: int) -> Any:
    """For each row of L U, the row of A that it equals."""
    if pivots.size == 0:
        return jnp.broadcast_to(jnp.arange(rows, dtype=jnp.int32), (*pivots.shape[:-1], rows))
    return lax.linalg.lu_pivots_to_permutation(pivots - 1, rows)


def _singular(packed: Any) -> Any:
    """For each matrix, the first index (from one) at which U's diagonal is zero, or 0 if there is none."""
    zero = jnp.diagonal(packed, axis1=-2, axis2=-1) == 0
    if zero.shape[-1] == 0:
        return jnp.zeros(zero.shape[:-1], jnp.int32)
    return jnp.where(jnp.any(zero, -1), jnp.argmax(zero, -1) + 1, 0).astype(jnp.int32)


@lower("linalg_lu_factor_ex")
def linalg_lu_factor_ex(A: Any, *, pivot: bool = True, check_errors: bool = False) -> Any:
    if not pivot:
        raise RuntimeError("linalg.lu_factor: LU without pivoting is not implemented on device 'jax'")
    packed, pivots = _factored(A)
    return packed, pivots, _singular(packed)


@lower("lu_unpack")
def lu_unpack(LU_data: Any, LU_pivots: Any, unpack_data: bool = True, unpack_pivots: bool = True) -> Any:
    """(P, L, U). Results that are not requested are empty."""
    rows, columns = LU_data.shape[-2:]
    small = min(rows, columns)
    empty = jnp.zeros((0,), LU_data.dtype)
    permutation, lower_part, upper_part = empty, empty, empty
    if unpack_pivots:
        is_at = _order(LU_pivots, rows)[..., None, :] == jnp.arange(rows, dtype=jnp.int32)[:, None]
        permutation = is_at.astype(LU_data.dtype)
    if unpack_data:
        lower_part = jnp.tril(LU_data[..., :, :small], -1) + jnp.eye(rows, small, dtype=LU_data.dtype)
        upper_part = jnp.triu(LU_data[..., :small, :])
    return permutation, lower_part, upper_part


@lower("linalg_lu")
def linalg_lu(A: Any, *, pivot: bool = True) -> Any:
    packed, pivots, _ = linalg_lu_factor_ex(A, pivot=pivot)
    return lu_unpack(packed, pivots)


@lower("linalg_lu_solve")
def linalg_lu_solve(LU: Any, pivots: Any, B: Any, *, left: bool = True, adjoint: bool = False) -> Any:
    if not left:  # X A = B is A^H X^H = B^H
        turned = linalg_lu_solve(LU, pivots, jnp.conj(jnp.swapaxes(B, -1, -2)), adjoint=not adjoint)
        return jnp.conj(jnp.swapaxes(turned, -1, -2))
    batch = jnp.broadcast_shapes(LU.shape[:-2], B.shape[:-2])
    rows = LU.shape[-1]
    right = jnp.broadcast_to(B, (*batch, *B.shape[-2:]))
    order = jnp.broadcast_to(_order(pivots, rows), (*batch, rows))
    if right.size == 0:
        return right
    if adjoint:
        factors = jnp.conj(jnp.swapaxes(LU, -1, -2))
        out = linalg_solve_triangular(factors, right, upper=False)
        out = linalg_solve_triangular(factors, out, upper=True, unitriangular=True)
        return jnp.take_along_axis(out, jnp.argsort(order, axis=-1)[..., None], axis=-2)
    out = jnp.take_along_axis(right, order[..., None], axis=-2)
    return linalg_solve_triangular(LU, linalg_solve_triangular(LU, out, upper=False, unitriangular=True), upper=True)


@lower("_linalg_solve_ex")
def _linalg_solve_ex(A: Any, B: Any, *, left: bool = True, check_errors: bool = False) -> Any:
    packed, pivots = _factored(A)
    is_vector = B.ndim == 1 or (A.ndim - 1 == B.ndim and B.shape == A.shape[:-1])
    out = linalg_lu_solve(packed, pivots, B[..., None] if is_vector else B, left=left or is_vector)
    return out[..., 0] if is_vector else out, packed, pivots, _singular(packed)


@lower("linalg_inv_ex")
def linalg_inv_ex(A: Any, *, check_errors: bool = False) -> Any:
    packed, pivots = _factored(A)
    identity = jnp.broadcast_to(jnp.eye(A.shape[-1], dtype=A.dtype), A.shape)
    return linalg_lu_solve(packed, pivots, identity), _singular(packed)


def _parity(pivots: Any) -> Any:
    """Sign of the permutation: each swapped row changes it."""
    swaps = jnp.sum(pivots != jnp.arange(1, pivots.shape[-1] + 1, dtype=pivots.dtype), axis=-1)
    return 1 - 2 * (swaps % 2)


@lower("_linalg_det")
def _linalg_det(A: Any) -> Any:
    packed, pivots = _factored(A)
    diagonal = jnp.diagonal(packed, axis1=-2, axis2=-1)
    return jnp.prod(diagonal, axis=-1) * _parity(pivots).astype(A.dtype), packed, pivots


@lower("_linalg_slogdet")
def _linalg_slogdet(A: Any) -> Any:
    packed, pivots = _factored(A)
    diagonal = jnp.diagonal(packed, axis1=-2, axis2=-1)
    sign = jnp.prod(jnp.sign(diagonal), axis=-1) * _parity(pivots).astype(A.dtype)
    return sign, jnp.sum(jnp.log(jnp.abs(diagonal)), axis=-1), packed, pivots
