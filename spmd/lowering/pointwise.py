"""Pointwise ops: each output element depends on the elements at the same position. Mostly a table from overload to jax function.

The adapter promotes and casts; a rule contains only the mathematics.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from spmd.base._convert import HALVES
from spmd.lowering import _arithmetic as arithmetic
from spmd.lowering._registry import is_static, lower, rounded_factor, scaled


def _unless_integral(fn: Any) -> Any:
    """`fn` for floating and complex arrays; integers and bools are unchanged."""

    def rule(self: Any) -> Any:
        return fn(self) if jnp.issubdtype(self.dtype, jnp.inexact) else self

    return rule


def _sign(self: Any) -> Any:
    """The sign. As on torch's CPU, it is +0 for zeros of either sign and for NaN."""
    if jnp.iscomplexobj(self):
        return jnp.sign(self)
    return (self > 0).astype(self.dtype) - (self < 0).astype(self.dtype)


def _unless_bool(fn: Any) -> Any:
    """`fn`, except for bools, which are unchanged."""

    def rule(self: Any) -> Any:
        return self if self.dtype == bool else fn(self)

    return rule


def _with_branch_sign(fn: Any, *, real: bool = False, imag: int = 1) -> Any:
    """`fn` for which the imaginary part of a complex result has the sign of the argument's imaginary part, times `imag`.

    On a branch cut, the sign of a zero selects the side (`sqrt(-1 - 0j)` is -1j). XLA ignores it.

    Args:
        real: also copy the sign of the real part.
        imag: 1 or -1.
    """

    def rule(self: Any) -> Any:
        out = fn(self)
        if not jnp.iscomplexobj(out):
            return out
        of_real = jnp.copysign(jnp.real(out), jnp.real(self)) if real else jnp.real(out)
        return lax.complex(of_real, jnp.copysign(jnp.imag(out), imag * jnp.imag(self)))

    return rule


_sqrt = _with_branch_sign(lax.sqrt)
_rsqrt = _with_branch_sign(lax.rsqrt, imag=-1)

# Overloads in one key have the same function: with a tensor, or with a number on either side.
_TABLE: dict[str, Any] = {
    "abs": jnp.abs,
    "acos": _with_branch_sign(jnp.arccos, imag=-1),
    "acosh": _with_branch_sign(jnp.arccosh),
    "asin": _with_branch_sign(jnp.arcsin, real=True),
    "asinh": _with_branch_sign(jnp.arcsinh, real=True),
    "atan": _with_branch_sign(jnp.arctan, real=True),
    "atan2": jnp.arctan2,
    "atanh": _with_branch_sign(jnp.arctanh, real=True),
    "bitwise_and.Tensor bitwise_and.Scalar bitwise_and.Scalar_Tensor": jnp.bitwise_and,
    "bitwise_not": jnp.bitwise_not,
    "bitwise_or.Tensor bitwise_or.Scalar bitwise_or.Scalar_Tensor": jnp.bitwise_or,
    "bitwise_xor.Tensor bitwise_xor.Scalar bitwise_xor.Scalar_Tensor": jnp.bitwise_xor,
    "ceil": _unless_integral(jnp.ceil),
    "copysign.Tensor copysign.Scalar": jnp.copysign,
    "cos": jnp.cos,
    "cosh": jnp.cosh,
    "deg2rad": jnp.deg2rad,
    "div.Tensor div.Scalar": arithmetic.div,
    "erf": lax.erf,
    "erfc": lax.erfc,
    "exp": jnp.exp,
    "exp2": jnp.exp2,
    "expm1": jnp.expm1,
    "floor": _unless_integral(jnp.floor),
    "fmax": lambda x, y: jnp.where((x >= y) | jnp.isnan(y), x, y),
    "fmin": lambda x, y: jnp.where((x <= y) | jnp.isnan(y), x, y),
    "fmod.Tensor fmod.Scalar": jnp.fmod,
    "frac": lambda x: x - jnp.trunc(x),
    "frexp.Tensor": jnp.frexp,
    "hypot": jnp.hypot,
    "isinf": jnp.isinf,
    "isnan": jnp.isnan,
    "isneginf": jnp.isneginf,
    "isposinf": jnp.isposinf,
    "lgamma": lax.lgamma,
    "log": jnp.log,
    "log10": jnp.log10,
    "log1p": jnp.log1p,
    "log2": jnp.log2,
    "logaddexp2": jnp.logaddexp2,
    "logical_and": jnp.logical_and,
    "logical_not": jnp.logical_not,
    "logical_or": jnp.logical_or,
    "logical_xor": jnp.logical_xor,
    "maximum": jnp.maximum,
    "minimum": jnp.minimum,
    "mul.Tensor mul.Scalar": arithmetic.mul,
    "neg": jnp.negative,
    "rad2deg": jnp.rad2deg,
    "reciprocal": jnp.reciprocal,
    "remainder.Tensor remainder.Scalar remainder.Scalar_Tensor": jnp.remainder,
    "round": _unless_integral(jnp.round),
    "rsqrt": _rsqrt,
    "sgn": _unless_bool(_sign),
    "sign": _unless_bool(_sign),
    "signbit": jnp.signbit,
    "sin": jnp.sin,
    "sinh": jnp.sinh,
    "sqrt": _sqrt,
    "tan": jnp.tan,
    "tanh": jnp.tanh,
    "trunc": _unless_integral(jnp.trunc),
}
# Computed after rounding to the promoted dtype, so bfloat16(0.1) == 0.1 is True.
_EXACT: dict[str, Any] = {
    "eq.Tensor eq.Scalar": jnp.equal,
    "ge.Tensor ge.Scalar": jnp.greater_equal,
    "gt.Tensor gt.Scalar": jnp.greater,
    "le.Tensor le.Scalar": jnp.less_equal,
    "lt.Tensor lt.Scalar": jnp.less,
    "ne.Tensor ne.Scalar": jnp.not_equal,
    "nextafter": jnp.nextafter,
}
_WIDE = frozenset({"div.Tensor div.Scalar", "mul.Tensor mul.Scalar"})
for _names, _fn in _TABLE.items():
    lower(*_names.split(), pointwise=True, wide="other" if _names in _WIDE else "")(_fn)
for _names, _fn in _EXACT.items():
    lower(*_names.split(), pointwise=True, widened=False)(_fn)


@lower("add.Tensor", "add.Scalar", pointwise=True)
def add(self: Any, other: Any, alpha: Any = 1) -> Any:
    return arithmetic.add(self, scaled(other, alpha))


@lower("sub.Tensor", "sub.Scalar", pointwise=True)
def sub(self: Any, other: Any, alpha: Any = 1) -> Any:
    return arithmetic.sub(self, scaled(other, alpha))


@lower("rsub.Tensor", "rsub.Scalar", pointwise=True)
def rsub(self: Any, other: Any, alpha: Any = 1) -> Any:
    return other - scaled(self, alpha)


@lower("div.Tensor_mode", "div.Scalar_mode", pointwise=True, widened=False, wide="other")
def div_mode(self: Any, other: Any, *, rounding_mode: str | None) -> Any:
    """As on torch's CPU, a 16-bit quotient of arrays is rounded to 16 bits before truncation, but not before the floor.

    XLA multiplies by the reciprocal of a scalar divisor, which may give 30 where the quotient is 29.99999. Truncation shows that.
    """
    if rounding_mode is None:
        return jnp.true_divide(self, other)
    is_integral = jnp.issubdtype(jnp.result_type(self, other), jnp.integer)
    if is_integral:
        return lax.div(*_integers(self, other)) if rounding_mode == "trunc" else jnp.floor_divide(self, other)
    wide = jnp.promote_types(jnp.result_type(self, other), jnp.float32)
    if rounding_mode == "trunc":
        if jnp.ndim(other) or wide == jnp.float64:
            return jnp.trunc(jnp.true_divide(self, other))
        return jnp.trunc((jnp.asarray(self, jnp.float64) / jnp.asarray(other, wide)).astype(wide))
    self, other = jnp.asarray(self, wide), jnp.asarray(other, wide)
    floor = jnp.floor_divide(self, other)
    return jnp.where(floor == 0, jnp.copysign(floor, self / other), floor)


@lower("floor_divide", "floor_divide.Scalar", pointwise=True, widened=False, wide="other")
def floor_divide(self: Any, other: Any) -> Any:
    return div_mode(self, other, rounding_mode="floor")


@lower("pow.Tensor_Scalar", pointwise=True, widened=False, static=("exponent",))
def pow_tensor_scalar(self: Any, exponent: Any) -> Any:
    """As on torch's CPU, the exponent is rounded to the 16 bits of the base, and the power is computed in more."""
    exponent = rounded_factor(exponent, self.dtype)
    self = self.astype(jnp.float32) if self.dtype in HALVES else self
    if is_static(exponent) and not isinstance(exponent, complex):
        if abs(exponent) <= 4 and exponent == int(exponent) and jnp.issubdtype(self.dtype, jnp.inexact):
            return lax.integer_pow(self, int(exponent))
        if exponent == 0.5:
            return _sqrt(self)
        if exponent == -0.5:  # like torch's CPU: the power of -0.0 is -inf, and that of -inf is NaN
            return _rsqrt(self)
    if is_static(exponent) and exponent == 0:
        return jnp.ones_like(self)
    if not jnp.issubdtype(self.dtype, jnp.integer):
        return _power(self, exponent)
    return lax.integer_pow(self, exponent) if isinstance(exponent, int) else _integer_power(self, jnp.asarray(exponent).astype(jnp.int64))


@lower("pow.Tensor_Tensor", "pow.Scalar", pointwise=True)
def pow_tensor(self: Any, exponent: Any) -> Any:
    """A negative power of an integer is the integer part of the reciprocal: 0, except for bases 1 and -1."""
    if not jnp.issubdtype(exponent.dtype, jnp.integer):
        return _power(self, exponent)
    if not jnp.issubdtype(exponent.dtype, jnp.signedinteger):
        return _integer_power(self, exponent)
    magnitude = _integer_power(self, jnp.abs(exponent))
    return jnp.where((exponent < 0) & (jnp.abs(magnitude) != 1), 0, magnitude)


def _power(base: Any, exponent: Any) -> Any:
    """The power of floating or complex numbers. Complex powers of 0 are torch's: 0 for exponents with a positive real part, NaN for 0."""
    power = jnp.power(base, exponent)
    if not jnp.iscomplexobj(power):
        return power
    power = jnp.where((base == 0) & (jnp.real(exponent) > 0), 0, power)
    return jnp.where((base == 0) & (exponent == 0), complex(jnp.nan, jnp.nan), power)


def _integer_power(base: Any, exponent: Any) -> Any:
    """The power of integers for exponents of any size, with wraparound. jax's `power` reads only six bits of the exponent."""
    base, exponent = jnp.broadcast_arrays(base, exponent)

    def with_bit(bit: Any, so_far: tuple[Any, Any]) -> tuple[Any, Any]:
        power, square = so_far
        is_set = lax.shift_right_logical(exponent, jnp.asarray(bit, exponent.dtype)) & 1
        return jnp.where(is_set == 1, power * square, power), square * square

    return lax.fori_loop(0, 8 * exponent.dtype.itemsize, with_bit, (jnp.ones_like(base), base))[0]


@lower("where.self", pointwise=True, promoted=("self", "other"))
def where(condition: Any, self: Any, other: Any) -> Any:
    return jnp.where(condition.astype(bool), self, other)


@lower("addcmul", pointwise=True, promoted=("self", "tensor1", "tensor2"))
def addcmul(self: Any, tensor1: Any, tensor2: Any, *, value: Any = 1) -> Any:
    return arithmetic.add(self, scaled(arithmetic.mul(tensor1, tensor2), value))


@lower("addcdiv", pointwise=True)
def addcdiv(self: Any, tensor1: Any, tensor2: Any, *, value: Any = 1) -> Any:
    return arithmetic.add(self, scaled(arithmetic.div(tensor1, tensor2), value))


@lower("masked_fill.Scalar", "masked_fill.Tensor", pointwise=True, promoted=("self",))
def masked_fill(self: Any, mask: Any, value: Any) -> Any:
    return jnp.where(mask, jnp.asarray(value).astype(self.dtype), self)


@lower("clamp", "clamp.Tensor", "clamp_min", "clamp_min.Tensor", pointwise=True)
def clamp(self: Any, min: Any = None, max: Any = None) -> Any:
    if min is not None:
        self = arithmetic.at_least(self, min)
    return self if max is None else arithmetic.at_most(self, max)


@lower("clamp_max", "clamp_max.Tensor", pointwise=True)
def clamp_max(self: Any, max: Any) -> Any:
    return arithmetic.at_most(self, max)


@lower("lerp.Scalar", "lerp.Tensor", pointwise=True, decides=("weight", lambda weight: abs(weight) < 0.5))
def lerp(self: Any, end: Any, weight: Any, *, decided: bool | None = None) -> Any:
    """Interpolate from the nearer end, so that weight 1 gives exactly `end`.

    If the weight is a setting of an optimizer, `decided` is whether `self` is nearer, as evaluated on the host.
    """
    is_near = abs(weight) < 0.5 if decided is None else decided
    if isinstance(is_near, bool):
        near, step = (self, weight) if is_near else (end, weight - 1)
    else:
        step = jnp.where(is_near, weight, weight - 1)
        alike = self.shape == end.shape and is_near.shape in ((), self.shape)
        near = lax.select(is_near, self, end) if alike else jnp.where(is_near, self, end)
    return arithmetic.add(near, arithmetic.mul(arithmetic.sub(end, self), step))


@lower("round.decimals", pointwise=True)
def round_decimals(self: Any, *, decimals: int) -> Any:
    if not jnp.issubdtype(self.dtype, jnp.inexact):
        return self
    scale = 10.0 ** abs(decimals)
    return jnp.round(self * scale) / scale if decimals >= 0 else jnp.round(self / scale) * scale


@lower("logaddexp", pointwise=True)
def logaddexp(self: Any, other: Any) -> Any:
    """For complex operands, the result keeps the phase of the larger one. jax wraps it to (-pi, pi]."""
    if not jnp.issubdtype(self.dtype, jnp.complexfloating):
        return jnp.logaddexp(self, other)
    is_larger = jnp.real(self) >= jnp.real(other)
    large, small = jnp.where(is_larger, self, other), jnp.where(is_larger, other, self)
    gap = jnp.where(small == large, jnp.zeros((), small.dtype), small - large)
    out = large + jnp.log1p(jnp.exp(gap))
    return jnp.where(jnp.isneginf(jnp.real(large)), large, out)


@lower("heaviside", pointwise=True)
def heaviside(self: Any, values: Any) -> Any:
    return jnp.where(self == 0, values, (self > 0).astype(self.dtype))


@lower("nan_to_num")
def nan_to_num(self: Any, nan: float | None = None, posinf: float | None = None, neginf: float | None = None) -> Any:
    return jnp.nan_to_num(self, nan=0.0 if nan is None else nan, posinf=posinf, neginf=neginf)


@lower("ldexp.Tensor", pointwise=True, wide="other")
def ldexp(self: Any, other: Any) -> Any:
    """Add to the floating-point exponent directly, which is exact and has no intermediate overflow."""
    if jnp.iscomplexobj(self) or jnp.iscomplexobj(other):
        return self * jnp.exp2(other)
    power = jnp.floor(other)
    by_exponent = jnp.ldexp(self * jnp.exp2(other - power), jnp.clip(power, -5000, 5000).astype(jnp.int32))
    return jnp.where(jnp.isfinite(other), by_exponent, self * jnp.exp2(other))


@lower("bitwise_left_shift.Tensor", "bitwise_left_shift.Tensor_Scalar", "bitwise_left_shift.Scalar_Tensor", pointwise=True)
def bitwise_left_shift(self: Any, other: Any) -> Any:
    """The result is 0 if the count is negative or at least the number of bits."""
    self, other = _integers(self, other)
    return lax.shift_left(self, other)


@lower("bitwise_right_shift.Tensor", "bitwise_right_shift.Tensor_Scalar", "bitwise_right_shift.Scalar_Tensor", pointwise=True)
def bitwise_right_shift(self: Any, other: Any) -> Any:
    """All bits of the result are the sign bit if the count is negative or at least the number of bits."""
    self, other = _integers(self, other)
    unsigned = jnp.issubdtype(self.dtype, jnp.unsignedinteger)
    return (lax.shift_right_logical if unsigned else lax.shift_right_arithmetic)(self, other)


@lower("__lshift__.Tensor", "__lshift__.Scalar", pointwise=True)
def lshift(self: Any, other: Any) -> Any:
    return self * jnp.exp2(other) if jnp.issubdtype(self.dtype, jnp.floating) else bitwise_left_shift(self, other)


@lower("__rshift__.Tensor", "__rshift__.Scalar", pointwise=True)
def rshift(self: Any, other: Any) -> Any:
    return self / jnp.exp2(other) if jnp.issubdtype(self.dtype, jnp.floating) else bitwise_right_shift(self, other)


@lower("gcd", pointwise=True)
def gcd(self: Any, other: Any) -> Any:
    """Euclid's algorithm in torch's order. jax's never ends for the lowest integer, whose absolute value is negative."""

    def step(pair: tuple[Any, Any]) -> tuple[Any, Any]:
        a, b = pair
        return jnp.where(a != 0, lax.rem(b, jnp.where(a != 0, a, 1)), a), jnp.where(a != 0, a, b)

    a, b = _integers(self, other)
    return lax.while_loop(lambda pair: jnp.any(pair[0] != 0), step, (jnp.abs(a), jnp.abs(b)))[1]


@lower("lcm", pointwise=True)
def lcm(self: Any, other: Any) -> Any:
    a, b = _integers(self, other)
    divisor = gcd(a, b)
    return jnp.where(divisor == 0, 0, jnp.abs(lax.div(a, jnp.where(divisor == 0, 1, divisor)) * b))


def _integers(self: Any, other: Any) -> tuple[Any, Any]:
    """Both operands, broadcast, in the dtype of the operand that is a tensor."""
    dtype = self.dtype if isinstance(self, jax.Array) and not self.weak_type else other.dtype
    self, other = (jnp.asarray(x) if isinstance(x, int) else x for x in (self, other))  # an int may have more bits than the dtype
    self, other = jnp.broadcast_arrays(jnp.asarray(self, dtype), jnp.asarray(other, dtype))
    return self, other
