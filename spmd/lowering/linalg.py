"""Linear algebra: factorisations and the ops that are built on them. Gradients are torch's own formulas over these results.

A factorisation that fails gives a nonzero `info`. jax has no LDL factorisation; ours is in `ldl`.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from spmd.lowering._registry import lower
from spmd.lowering.matmul import combined, unless_zero
from spmd.lowering.norm import wide


def _adjoint(x: Any) -> Any:
    return jnp.conj(jnp.swapaxes(x, -1, -2))


def _empty(x: Any) -> Any:
    """torch's value for a result that is not requested."""
    return jnp.zeros((0,), x.dtype)


@lower("cholesky")
def cholesky(self: Any, upper: bool = False) -> Any:
    if self.size == 0:
        return self
    factor = lax.linalg.cholesky(_adjoint(self) if upper else self, symmetrize_input=False)
    return _adjoint(factor) if upper else factor


@lower("linalg_cholesky_ex")
def linalg_cholesky_ex(self: Any, *, upper: bool = False, check_errors: bool = False) -> Any:
    """(L, info: 0, or the order, from one, of the first minor that is not positive definite).

    A failed L is LAPACK's: the columns before that minor, its pivot, and `self`. With `check_errors` it is NaN.
    """
    factor = cholesky(self, upper)
    failed = jnp.any(jnp.isnan(factor), axis=(-1, -2))
    if self.size == 0:
        return factor, failed.astype(jnp.int32)

    def examined() -> tuple[Any, Any]:
        partial, info = _first_columns(_adjoint(self) if upper else self)
        partial = _adjoint(partial) if upper else partial
        return jnp.where(failed[..., None, None] & (not check_errors), partial, factor), jnp.where(failed, info, 0)

    return lax.cond(jnp.any(failed), examined, lambda: (factor, jnp.zeros(failed.shape, jnp.int32)))


def _first_columns(x: Any) -> tuple[Any, Any]:
    """(L up to the first pivot that is not positive, then the lower triangle of `x`; the number of that pivot, from one)."""
    size = x.shape[-1]
    index = jnp.arange(size)

    def step(state: Any) -> Any:
        k, rest, packed, info = state
        column = jnp.where(index >= k, jnp.take(rest, k, axis=-1), 0)
        pivot = jnp.real(jnp.take(column, k, axis=-1))
        fails = (info == 0) & ~(pivot > 0)
        info = jnp.where(fails, k + 1, info).astype(jnp.int32)
        is_used = (info == 0)[..., None, None]
        done = column / jnp.sqrt(jnp.where(info == 0, pivot, 1)).astype(x.dtype)[..., None]
        packed = jnp.where(is_used & (index == k) & (index[:, None] >= k), done[..., None], packed)
        is_pivot = (index == k) & (index[:, None] == k)
        packed = jnp.where(fails[..., None, None] & is_pivot, pivot.astype(x.dtype)[..., None, None], packed)
        return k + 1, rest - jnp.where(is_used, done[..., :, None] * jnp.conj(done)[..., None, :], 0), packed, info

    start = jnp.zeros((), index.dtype), x, jnp.tril(x), jnp.zeros(x.shape[:-2], jnp.int32)
    return lax.while_loop(lambda state: state[0] < size, step, start)[2:]


@lower("_cholesky_solve_helper")
def _cholesky_solve_helper(self: Any, A: Any, upper: bool) -> Any:
    middle = linalg_solve_triangular(_adjoint(A) if upper else A, self, upper=False)
    return linalg_solve_triangular(A if upper else _adjoint(A), middle, upper=True)


@lower("cholesky_inverse")
def cholesky_inverse(self: Any, upper: bool = False) -> Any:
    return _cholesky_solve_helper(jnp.broadcast_to(jnp.eye(self.shape[-1], dtype=self.dtype), self.shape), self, upper)


@lower("linalg_solve_triangular")
def linalg_solve_triangular(self: Any, B: Any, *, upper: bool, left: bool = True, unitriangular: bool = False) -> Any:
    batch = jnp.broadcast_shapes(self.shape[:-2], B.shape[:-2])
    matrix, right = jnp.broadcast_to(self, batch + self.shape[-2:]), jnp.broadcast_to(B, batch + B.shape[-2:])
    if right.size == 0:
        return right
    return lax.linalg.triangular_solve(matrix, right, left_side=left, lower=not upper, unit_diagonal=unitriangular)


@lower("triangular_solve")
def triangular_solve(self: Any, A: Any, upper: bool = True, transpose: bool = False, unitriangular: bool = False) -> Any:
    batch = jnp.broadcast_shapes(self.shape[:-2], A.shape[:-2])
    full = jnp.broadcast_to(A, batch + A.shape[-2:])
    solved = linalg_solve_triangular(
        jnp.swapaxes(A, -1, -2) if transpose else A, self, upper=upper != transpose, unitriangular=unitriangular
    )
    return solved, full


@lower("linalg_qr")
def linalg_qr(A: Any, mode: str = "reduced") -> Any:
    *batch, rows, columns = A.shape
    if A.size == 0:
        inner = rows if mode == "complete" else min(rows, columns)
        q = jnp.broadcast_to(jnp.eye(rows, inner, dtype=A.dtype), (*batch, rows, inner))
        return (_empty(A) if mode == "r" else q), jnp.zeros((*batch, inner, columns), A.dtype)
    q, r = jnp.linalg.qr(A, mode="complete" if mode == "complete" else "reduced")
    return (_empty(A) if mode == "r" else q), r


@lower("geqrf")
def geqrf(self: Any) -> Any:
    if self.size == 0:
        return self, jnp.zeros((*self.shape[:-2], min(self.shape[-2:])), self.dtype)
    reflectors, tau = jnp.linalg.qr(self, mode="raw")
    return jnp.swapaxes(reflectors, -1, -2), tau


@lower("linalg_householder_product")
def linalg_householder_product(input: Any, tau: Any) -> Any:
    return lax.linalg.householder_product(input, tau) if input.size else input


@lower("ormqr")
def ormqr(self: Any, input2: Any, input3: Any, left: bool = True, transpose: bool = False) -> Any:
    """Q @ input3, or input3 @ Q if not `left`, with the orthogonal Q of the reflectors `self` and `input2`."""
    rows, count = self.shape[-2:]
    if input3.size == 0:
        return input3
    padded = jnp.concatenate([self, jnp.zeros((*self.shape[:-2], rows, rows - count), self.dtype)], axis=-1) if rows > count else self
    q = lax.linalg.householder_product(padded[..., :rows], input2)
    q = _adjoint(q) if transpose else q
    return jnp.matmul(q, input3) if left else jnp.matmul(input3, q)


@lower("_linalg_svd")
def _linalg_svd(A: Any, full_matrices: bool = False, compute_uv: bool = True, *, driver: str | None = None) -> Any:
    if A.size == 0:
        return _empty_svd(A, full_matrices, compute_uv)
    if not compute_uv:
        return _empty(A), jnp.linalg.svd(A, compute_uv=False), _empty(A)
    return tuple(jnp.linalg.svd(A, full_matrices=full_matrices))


def _empty_svd(A: Any, full_matrices: bool, compute_uv: bool) -> Any:
    *batch, rows, columns = A.shape
    small = min(rows, columns)
    values = jnp.zeros((*batch, small), jnp.finfo(A.dtype).dtype)
    if not compute_uv:
        return _empty(A), values, _empty(A)
    u = jnp.broadcast_to(jnp.eye(rows, rows if full_matrices else small, dtype=A.dtype), (*batch, rows, rows if full_matrices else small))
    vh = jnp.eye(columns if full_matrices else small, columns, dtype=A.dtype)
    return u, values, jnp.broadcast_to(vh, (*batch, *vh.shape))


@lower("_linalg_eigh")
def _linalg_eigh(A: Any, UPLO: str = "L", compute_v: bool = True) -> Any:
    if A.size == 0:
        return jnp.zeros(A.shape[:-1], jnp.finfo(A.dtype).dtype), A if compute_v else _empty(A)
    vectors, values = lax.linalg.eigh(A, lower=UPLO.upper() == "L", symmetrize_input=False)
    return values, vectors if compute_v else _empty(A)


@lower("linalg_eig")
def linalg_eig(self: Any) -> Any:
    """Eigendecomposition. jax has it only on CPU."""
    if self.size == 0:
        dtype = jnp.promote_types(self.dtype, jnp.complex64)
        return jnp.zeros(self.shape[:-1], dtype), self.astype(dtype)
    values, vectors = lax.linalg.eig(self, compute_left_eigenvectors=False)
    return values, vectors


@lower("_linalg_eigvals")
def _linalg_eigvals(self: Any) -> Any:
    return linalg_eig(self)[0]


@lower("linalg_matrix_exp")
def linalg_matrix_exp(self: Any) -> Any:
    if self.size == 0:
        return self
    return jax.scipy.linalg.expm(wide(self), max_squarings=64)


def _require_driver(self: Any, b: Any, rcond: float | None = None, *, driver: str | None = None) -> None:
    if driver not in (None, "gels", "gelsy", "gelsd", "gelss"):
        raise RuntimeError("torch.linalg.lstsq: parameter `driver` should be one of (gels, gelsy, gelsd, gelss)")


@lower("linalg_lstsq", check=_require_driver)
def linalg_lstsq(self: Any, b: Any, rcond: float | None = None, *, driver: str | None = None) -> Any:
    """Least squares by singular value decomposition for every driver, which is correct for rank-deficient matrices too."""
    rows, columns = self.shape[-2:]
    is_vector = b.ndim == self.ndim - 1 and b.shape == self.shape[:-1]
    right = b[..., None] if is_vector else b
    batch = jnp.broadcast_shapes(self.shape[:-2], right.shape[:-2])
    real = jnp.finfo(self.dtype).dtype
    u, values, vh = _linalg_svd(self)
    cut = (jnp.finfo(self.dtype).eps * max(rows, columns) if rcond is None else rcond) * jnp.max(values, -1, keepdims=True, initial=0)
    used = values > cut
    inverse = jnp.where(used, 1 / jnp.where(used, values, 1), 0).astype(self.dtype)
    out = jnp.matmul(_adjoint(vh), inverse[..., None] * jnp.matmul(_adjoint(u), right))
    out = jnp.broadcast_to(out, (*batch, columns, right.shape[-1]))
    residuals = jnp.zeros((0,), real)
    if rows > columns and driver not in (None, "gelsy"):  # gelsy is the default
        residuals = jnp.sum(jnp.abs(jnp.matmul(self, out) - right) ** 2, axis=-2)
    rank = jnp.sum(used, axis=-1) if driver != "gels" else jnp.zeros((0,), jnp.int64)
    shown = values if driver in ("gelsd", "gelss") else jnp.zeros((0,), real)
    return out[..., 0] if is_vector else out, residuals, rank, shown


@lower("linalg_cross")
def linalg_cross(self: Any, other: Any, *, dim: int = -1) -> Any:
    self, other = jnp.broadcast_arrays(self, other)
    return jnp.cross(self, other, axis=dim)


@lower("addbmm", static=("beta", "alpha"))
def addbmm(self: Any, batch1: Any, batch2: Any, *, beta: Any = 1, alpha: Any = 1) -> Any:
    return combined(self, unless_zero(alpha, functools.partial(jnp.einsum, "bij,bjk->ik"), batch1, batch2), beta, alpha)


@lower("vdot")
def vdot(self: Any, other: Any) -> Any:
    return jnp.vdot(self, other)
