"""L D L^T factorisation of symmetric or Hermitian matrices with Bunch-Kaufman pivoting, and solving with its factors.

Follows LAPACK's `sytf2`, `hetf2` and `sytrs` for the lower triangle step by step (Golub and Van Loan, "Matrix Computations", 4.4), so
that pivots and factors equal those of torch. D has 1x1 blocks, and 2x2 blocks where two pivots are negative. Pivots count from one.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from spmd.lowering._registry import lower

_ALPHA = (1 + 17**0.5) / 8  # a pivot below this fraction of the largest element of its column makes a 2x2 block


@lower("linalg_ldl_factor_ex")
def linalg_ldl_factor_ex(self: Any, *, hermitian: bool = False, check_errors: bool = False) -> Any:
    """(L and D in one lower triangle, pivots, info: 0, or the first column, from one, with a zero pivot).

    Only the lower triangle of `self` is read.
    """
    if self.size == 0:
        return jnp.tril(self), jnp.zeros(self.shape[:-1], jnp.int32), jnp.zeros(self.shape[:-2], jnp.int32)
    is_hermitian = hermitian and jnp.iscomplexobj(self)
    flat = jnp.tril(self).reshape(-1, *self.shape[-2:])
    packed, pivots, info = jax.vmap(lambda matrix: _factored(matrix, is_hermitian))(flat)
    return packed.reshape(self.shape), pivots.reshape(self.shape[:-1]), info.reshape(self.shape[:-2])


def _magnitude(x: Any) -> Any:
    """The magnitude that LAPACK compares: |re| + |im|."""
    return jnp.abs(jnp.real(x)) + jnp.abs(jnp.imag(x)) if jnp.iscomplexobj(x) else jnp.abs(x)


def _conj(x: Any, is_hermitian: bool) -> Any:
    return jnp.conj(x) if is_hermitian else x


def _diagonal(x: Any, is_hermitian: bool) -> Any:
    return jnp.real(x).astype(x.dtype) if is_hermitian else x


def _factored(triangle: Any, is_hermitian: bool) -> tuple[Any, Any, Any]:
    """Factor one matrix. `rest` is the part that is still to be factored, with both triangles."""
    size = triangle.shape[0]
    index = jnp.arange(size)
    strictly = jnp.tril(triangle, -1)
    diagonal = _diagonal(jnp.diagonal(triangle), is_hermitian)
    rest = strictly + _conj(strictly, is_hermitian).T + jnp.diag(diagonal)

    def step(state: Any) -> Any:
        k, rest, packed, pivots, info = state
        kp, is_pair, is_zero = _pivot(rest, k, index)
        kk = jnp.where(is_pair, k + 1, k)
        order = jnp.where(index == kk, kp, jnp.where(index == kp, kk, index))
        rest = rest[order][:, order]
        single, pair = _by_one(rest, packed, k, index, is_hermitian), _by_two(rest, packed, k, index, is_hermitian)
        unchanged = rest, jnp.where((index == k) & (index[:, None] == k), rest, packed)
        rest, packed = jax.tree.map(lambda one, two, none: jnp.where(is_zero, none, jnp.where(is_pair, two, one)), single, pair, unchanged)
        own = jnp.where(is_pair, -(kp + 1), kp + 1).astype(jnp.int32)
        pivots = jnp.where((index == k) | (is_pair & (index == k + 1)), own, pivots)
        info = jnp.where(is_zero & (info == 0), k + 1, info).astype(jnp.int32)
        return kk + 1, rest, packed, pivots, info

    start = jnp.zeros((), index.dtype), rest, jnp.zeros_like(triangle), jnp.zeros(size, jnp.int32), jnp.zeros((), jnp.int32)
    _, _, packed, pivots, info = lax.while_loop(lambda state: state[0] < size, step, start)
    return packed, pivots, info


def _pivot(rest: Any, k: Any, index: Any) -> tuple[Any, Any, Any]:
    """(row to exchange with, whether the block is 2x2, whether the column is zero)."""
    magnitudes = _magnitude(rest)
    own = magnitudes[k, k]
    below = jnp.where(index > k, magnitudes[:, k], -1)
    other = jnp.argmax(below)
    largest = jnp.maximum(below[other], 0)
    in_row = jnp.max(jnp.where((index >= k) & (index != other), magnitudes[other], 0))
    is_zero = (jnp.maximum(own, largest) == 0) | jnp.isnan(own)
    keeps = (own >= _ALPHA * largest) | (own * in_row >= _ALPHA * largest * largest) | is_zero
    takes_other = magnitudes[other, other] >= _ALPHA * in_row
    return jnp.where(keeps, k, other), ~keeps & ~takes_other, is_zero


def _by_one(rest: Any, packed: Any, k: Any, index: Any, is_hermitian: bool) -> tuple[Any, Any]:
    """Eliminate row k by its diagonal element."""
    pivot = _diagonal(rest[k, k], is_hermitian)
    column = jnp.where(index > k, rest[:, k], 0)
    factors = column * (1 / pivot)
    updated = rest - factors[:, None] * _conj(column, is_hermitian)[None, :]
    written = jnp.where(index > k, factors, jnp.where(index == k, pivot, packed[:, k]))
    return updated, jnp.where(index[None, :] == k, written[:, None], packed)


def _by_two(rest: Any, packed: Any, k: Any, index: Any, is_hermitian: bool) -> tuple[Any, Any]:
    """Eliminate rows k and k + 1 by their 2x2 block."""
    after = jnp.minimum(k + 1, index.shape[0] - 1)
    first, last, corner = _diagonal(rest[k, k], is_hermitian), _diagonal(rest[after, after], is_hermitian), rest[after, k]
    scale = jnp.abs(corner).astype(rest.dtype) if is_hermitian else corner
    low, high, turn = last / scale, first / scale, corner / scale
    factor = 1 / (low * high - 1) / scale
    one, two = (jnp.where(index > after, rest[:, column], 0) for column in (k, after))
    of_one, of_two = factor * (low * one - turn * two), factor * (high * two - _conj(turn, is_hermitian) * one)
    updated = rest - one[:, None] * _conj(of_one, is_hermitian)[None, :] - two[:, None] * _conj(of_two, is_hermitian)[None, :]
    left = jnp.where(index > after, of_one, jnp.where(index == k, first, jnp.where(index == after, corner, packed[:, k])))
    right = jnp.where(index > after, of_two, jnp.where(index == after, last, packed[:, after]))
    packed = jnp.where(index[None, :] == k, left[:, None], packed)
    return updated, jnp.where(index[None, :] == after, right[:, None], packed)


@lower("linalg_ldl_solve")
def linalg_ldl_solve(LD: Any, pivots: Any, B: Any, *, hermitian: bool = False) -> Any:
    """Solve A X = B with the factors of A."""
    size, columns = B.shape[-2:]
    is_hermitian = hermitian and jnp.iscomplexobj(B)
    batch = jnp.broadcast_shapes(LD.shape[:-2], B.shape[:-2])
    if B.size == 0 or LD.size == 0:
        return jnp.zeros((*batch, size, columns), B.dtype)
    flat = (
        jnp.broadcast_to(x, (*batch, *x.shape[rank:])).reshape(-1, *x.shape[rank:])
        for x, rank in ((LD, LD.ndim - 2), (pivots, pivots.ndim - 1), (B, B.ndim - 2))
    )
    solved = jax.vmap(lambda packed, order, right: _solved(packed, order, right, is_hermitian))(*flat)
    return solved.reshape(*batch, size, columns)


def _solved(packed: Any, pivots: Any, right: Any, is_hermitian: bool) -> Any:
    """Solve for one matrix: L and D from the top, then L^T from the bottom, with the row exchanges of the factorisation."""
    size = packed.shape[0]
    index = jnp.arange(size)

    def exchanged(x: Any, a: Any, b: Any) -> Any:
        return x[jnp.where(index == a, b, jnp.where(index == b, a, index))]

    def down(state: Any) -> Any:
        k, x = state
        is_pair = pivots[k] < 0
        after = jnp.minimum(k + 1, size - 1)
        last = jnp.where(is_pair, after, k)
        x = exchanged(x, last, jnp.abs(pivots[k]) - 1)
        left, right_ = (jnp.where(index > last, packed[:, column], 0)[:, None] for column in (k, after))
        single = x - left * x[k]
        single = jnp.where((index == k)[:, None], x[k] / _diagonal(packed[k, k], is_hermitian), single)
        pair = x - left * x[k] - right_ * x[after]
        corner = packed[after, k]
        high, low = packed[k, k] / _conj(corner, is_hermitian), packed[after, after] / corner
        scale = high * low - 1
        one, two = x[k] / _conj(corner, is_hermitian), x[after] / corner
        pair = jnp.where((index == k)[:, None], (low * one - two) / scale, pair)
        pair = jnp.where((index == after)[:, None], (high * two - one) / scale, pair)
        return last + 1, jnp.where(is_pair, pair, single)

    def up(state: Any) -> Any:
        k, x = state
        is_pair = pivots[k] < 0
        before = jnp.maximum(k - 1, 0)
        columns = _conj(jnp.where((index > k)[:, None], packed, 0), is_hermitian)
        own, other = columns[:, k] @ x, columns[:, before] @ x
        x = jnp.where((index == k)[:, None], x - own, jnp.where(is_pair & (index == before)[:, None], x - other, x))
        x = exchanged(x, k, jnp.abs(pivots[k]) - 1)
        return jnp.where(is_pair, k - 2, k - 1), x

    _, right = lax.while_loop(lambda state: state[0] < size, down, (jnp.zeros((), index.dtype), right))
    return lax.while_loop(lambda state: state[0] >= 0, up, (jnp.asarray(size - 1, index.dtype), right))[1]
