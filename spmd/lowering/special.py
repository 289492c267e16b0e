"""Special functions: gamma and related functions, error functions, entropies, orthogonal polynomials."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from spmd.lowering._registry import lower


def _x_log(x: Any, y: Any, log_y: Any) -> Any:
    """`x * log_y`, but 0 where x is 0, and NaN where y is NaN."""
    return jnp.where(jnp.isnan(y), jnp.nan, jnp.where(x == 0, 0.0, x * log_y))


@lower("xlogy.Tensor", "xlogy.Scalar_Other", "xlogy.Scalar_Self", pointwise=True)
def xlogy(self: Any, other: Any) -> Any:
    self, other = _floating(self, other)
    return _x_log(self, other, jnp.log(other))


@lower("special_xlog1py", "special_xlog1py.other_scalar", "special_xlog1py.self_scalar", pointwise=True)
def special_xlog1py(self: Any, other: Any) -> Any:
    self, other = _floating(self, other)
    return _x_log(self, other, jnp.log1p(other))


def _floating(*operands: Any) -> tuple[Any, ...]:
    """The operands, tensors and numbers, in the floating dtype of the tensors."""
    dtype = next((x.dtype for x in operands if isinstance(x, jax.Array) and not x.weak_type), jnp.float32)
    return tuple(jnp.asarray(x, dtype) for x in operands)


@lower("special_entr", pointwise=True)
def special_entr(self: Any) -> Any:
    entropy = jnp.where(self == 0, 0.0, jnp.where(self > 0, -self * jnp.log(self), -jnp.inf))
    return jnp.where(jnp.isnan(self), self, entropy)


if HAS_ERFCX := hasattr(jax.scipy.special, "erfcx"):  # missing in jax 0.10.0

    @lower("special_erfcx", pointwise=True)
    def special_erfcx(self: Any) -> Any:
        """jax's function, and the asymptotic series where that is 0: its erfc is subnormal from 9.19 (float64: 26.54) on."""
        half = 0.5 / (self * self)
        series = functools.reduce(lambda inner, odd: 1 - odd * half * inner, range(15, 0, -2), 1.0)
        return jnp.where(
            self > (26 if self.dtype == jnp.float64 else 9), series / (self * math.sqrt(math.pi)), jax.scipy.special.erfcx(self)
        )


lower("special_ndtri", pointwise=True)(jax.scipy.special.ndtri)


@lower("special_log_ndtr", pointwise=True)
def special_log_ndtr(self: Any) -> Any:
    t = self * math.sqrt(0.5)
    left = jnp.log(special_erfcx(-t) / 2) - t * t if HAS_ERFCX else jax.scipy.special.log_ndtr(self)
    return jnp.where(self < -1.0, left, jnp.log1p(-lax.erfc(t) / 2))


@lower("sinc", pointwise=True)
def sinc(self: Any) -> Any:
    product = math.pi * self
    return jnp.where(self == 0, jnp.ones((), self.dtype), jnp.sin(product) / product)


@lower("erfinv", pointwise=True)
def erfinv(self: Any) -> Any:
    """jax's approximation (six digits), improved by a Newton step on erfc, which is accurate where erf is flat."""
    size = jnp.abs(self)
    guess = jnp.abs(lax.erf_inv(self))
    step = (lax.erfc(guess) - (1 - size)) * (math.sqrt(math.pi) / 2) * jnp.exp(guess * guess)
    better = jnp.copysign(guess + step, self)
    return jnp.where((size < 1) & (size > 0.5), better, lax.erf_inv(self))


@lower("digamma", pointwise=True)
def digamma(self: Any) -> Any:
    return jnp.where(self == 0, jnp.copysign(jnp.inf, -self), lax.digamma(self))


@lower("polygamma", pointwise=True, promoted=("self",))
def polygamma(n: int, self: Any) -> Any:
    if n == 0:
        return digamma(self)
    order = jnp.full_like(self, n + 1)
    if n == 1:
        reflected = (math.pi / jnp.sin(math.pi * self)) ** 2 - lax.zeta(order, 1 - self)
        direct = jnp.where(self == jnp.inf, 0.0, lax.zeta(order, self))
        return jnp.where(self < 0.5, reflected, direct)
    sign = 1.0 if n % 2 else -1.0
    return sign * math.exp(math.lgamma(n + 1.0)) * _zeta(order, self)


def _zeta(x: Any, q: Any) -> Any:
    """Hurwitz zeta, also for q <= 0, where `lax.zeta` is wrong.

    It is infinite at the poles. Between them, for an integer order, terms are added one by one up to q >= 1, so that those on both
    sides of zero cancel.
    """
    x, q = jnp.broadcast_arrays(x, q)
    is_pole = (q <= 0) & (q == jnp.floor(q)) & (x > 1)
    steps = (q < 0) & (q != jnp.floor(q)) & (x == jnp.floor(x)) & (x > 1)

    def advance(state: Any) -> Any:
        total, q = state
        goes = steps & (q < 1)
        return jnp.where(goes, total + jnp.power(q, -x), total), jnp.where(goes, q + 1, q)

    total, q = lax.while_loop(lambda state: jnp.any(steps & (state[1] < 1)), advance, (jnp.zeros_like(q), q))
    return jnp.where(x < 1, jnp.nan, jnp.where(is_pole, jnp.inf, total + lax.zeta(x, q)))


@lower("special_zeta", "special_zeta.other_scalar", "special_zeta.self_scalar", pointwise=True)
def special_zeta(self: Any, other: Any) -> Any:
    return _zeta(*_floating(self, other))


def _incomplete_gamma(fn: Callable[[Any, Any], Any], a: Any, x: Any, at_a_zero: float) -> Any:
    """`fn`, with torch's values at the border of its domain."""
    a, x = jnp.broadcast_arrays(a, x)
    out = jnp.where(a == 0, jnp.where(x > 0, at_a_zero, jnp.nan), fn(a, x))
    out = jnp.where(jnp.isinf(a), jnp.where(jnp.isinf(x), jnp.nan, 1.0 - at_a_zero), out)
    return jnp.where((x < 0) | (a < 0), jnp.nan, out)


@lower("igamma", pointwise=True)
def igamma(self: Any, other: Any) -> Any:
    return _incomplete_gamma(lax.igamma, self, other, 1.0)


@lower("igammac", pointwise=True)
def igammac(self: Any, other: Any) -> Any:
    return _incomplete_gamma(lax.igammac, self, other, 0.0)


def _recurrence(x: Any, n: Any, first: Any, step: Callable[[Any, Any, Any], Any]) -> Any:
    """Degree n of a family with p_0 = 1, p_1 = `first` and p_{k+1} = step(k, p_k, p_{k-1}); 0 for negative degrees."""

    def is_running(state: Any) -> Any:
        k, _, last, out = state
        return jnp.any((k < n) & ~jnp.isnan(last) & ~jnp.isnan(out))

    def advance(state: Any) -> Any:
        k, before, last, out = state
        new = step(k.astype(x.dtype), last, before)
        return k + 1, last, new, jnp.where(k + 1 == n, new, out)

    one = jnp.ones_like(x)
    out = jnp.where(n == 0, one, jnp.where(n < 0, 0.0, first))
    state = lax.while_loop(is_running, advance, (jnp.ones((), n.dtype), one, first, out))
    _, _, last, out = state
    return jnp.where((n > 1) & jnp.isnan(last), jnp.where(state[0] < n, last, out), out)


def _degree(x: Any, n: Any) -> tuple[Any, Any]:
    """x and the integer degree n, broadcast. A NaN degree becomes negative, as in torch's cast."""
    x, n = jnp.broadcast_arrays(*_floating(x, n))
    return x, jnp.where(jnp.isnan(n), -1, n).astype(jnp.int64)


def _chebyshev(x: Any, n: Any, first: Any, closed: Callable[[Any, Any], Any], limit: int) -> Any:
    """A Chebyshev polynomial: the closed form in the angle inside (-1, 1) above degree `limit`, else the recurrence."""
    is_closed = (n > limit) & (jnp.abs(x) < 1.0)
    by_steps = _recurrence(x, jnp.where(is_closed, 0, n), first, lambda k, last, before: (x + x) * last - before)
    angle = jnp.arccos(jnp.clip(x, -1.0, 1.0))
    return jnp.where(is_closed, closed(n.astype(x.dtype), angle), by_steps)


def _chebyshev_t(x: Any, n: Any, limit: int = 6) -> Any:
    return _chebyshev(x, n, x, lambda n, angle: jnp.cos(n * angle), limit)


def _chebyshev_u(x: Any, n: Any, limit: int = 8) -> Any:
    return _chebyshev(x, n, x + x, lambda n, angle: jnp.sin((n + 1) * angle) / jnp.sin(angle), limit)


def _chebyshev_v(x: Any, n: Any, limit: int = 8) -> Any:
    return _chebyshev(x, n, x + x - 1, lambda n, angle: jnp.cos((n + 0.5) * angle) / jnp.cos(angle / 2), limit)


def _chebyshev_w(x: Any, n: Any, limit: int = 8) -> Any:
    return _chebyshev(x, n, x + x + 1, lambda n, angle: jnp.sin((n + 0.5) * angle) / jnp.sin(angle / 2), limit)


def _hermite_h(x: Any, n: Any) -> Any:
    out = _recurrence(x, n, x + x, lambda k, last, before: (x + x) * last - (k + k) * before)
    return jnp.where(n > (512 if x.dtype == jnp.float64 else 128), jnp.nan, out)


def _hermite_he(x: Any, n: Any) -> Any:
    out = _recurrence(x, n, x, lambda k, last, before: x * last - k * before)
    return jnp.where(n > (512 if x.dtype == jnp.float64 else 128), jnp.nan, out)


def _laguerre_l(x: Any, n: Any) -> Any:
    return _recurrence(x, n, 1 - x, lambda k, last, before: (((k + k) + (1 - x)) * last - k * before) / (k + 1))


def _legendre_p(x: Any, n: Any) -> Any:
    return _recurrence(x, n, x, lambda k, last, before: ((k + k + 1) * x * last - k * before) / (k + 1))


_POLYNOMIALS: dict[str, Callable[[Any, Any], Any]] = {
    "chebyshev_polynomial_t": _chebyshev_t,
    "chebyshev_polynomial_u": _chebyshev_u,
    "chebyshev_polynomial_v": _chebyshev_v,
    "chebyshev_polynomial_w": _chebyshev_w,
    "hermite_polynomial_h": _hermite_h,
    "hermite_polynomial_he": _hermite_he,
    "laguerre_polynomial_l": _laguerre_l,
    "legendre_polynomial_p": _legendre_p,
    "shifted_chebyshev_polynomial_t": lambda x, n: _chebyshev_t(x + x - 1, n),
    "shifted_chebyshev_polynomial_u": lambda x, n: _chebyshev_u(x + x - 1, n, 6),
    "shifted_chebyshev_polynomial_v": lambda x, n: _chebyshev_v(x + x - 1, n, 6),
    "shifted_chebyshev_polynomial_w": lambda x, n: _chebyshev_w(x + x - 1, n, 4),
}


def _register_polynomial(name: str, polynomial: Callable[[Any, Any], Any]) -> None:
    @lower(f"special_{name}", f"special_{name}.x_scalar", f"special_{name}.n_scalar", pointwise=True)
    def rule(x: Any, n: Any) -> Any:
        return polynomial(*_degree(x, n))


for _name, _polynomial in _POLYNOMIALS.items():
    _register_polynomial(_name, _polynomial)
