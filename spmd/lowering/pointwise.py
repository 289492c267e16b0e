"""Pointwise ops: one output element from the elements at the same place. Mostly a table from overload to jax function.

The adapter promotes and casts; a rule only says the mathematics.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from spmd.lowering._registry import is_static, lower, scaled

_TABLE: dict[str, Any] = {
    "abs": jnp.abs,
    "acos": jnp.arccos,
    "acosh": jnp.arccosh,
    "asin": jnp.arcsin,
    "asinh": jnp.arcsinh,
    "atan": jnp.arctan,
    "atan2": jnp.arctan2,
    "atanh": jnp.arctanh,
    "bitwise_and.Tensor": jnp.bitwise_and,
    "bitwise_not": jnp.bitwise_not,
    "bitwise_or.Tensor": jnp.bitwise_or,
    "bitwise_xor.Tensor": jnp.bitwise_xor,
    "ceil": jnp.ceil,
    "cos": jnp.cos,
    "cosh": jnp.cosh,
    "div.Tensor": jnp.true_divide,
    "eq.Scalar": jnp.equal,
    "eq.Tensor": jnp.equal,
    "erf": lax.erf,
    "erfc": lax.erfc,
    "erfinv": lax.erf_inv,
    "exp": jnp.exp,
    "exp2": jnp.exp2,
    "expm1": jnp.expm1,
    "floor": jnp.floor,
    "fmax": jnp.fmax,
    "fmin": jnp.fmin,
    "fmod.Tensor": jnp.fmod,
    "ge.Scalar": jnp.greater_equal,
    "ge.Tensor": jnp.greater_equal,
    "gt.Scalar": jnp.greater,
    "gt.Tensor": jnp.greater,
    "hypot": jnp.hypot,
    "isinf": jnp.isinf,
    "isnan": jnp.isnan,
    "le.Scalar": jnp.less_equal,
    "le.Tensor": jnp.less_equal,
    "lgamma": lax.lgamma,
    "log": jnp.log,
    "log10": jnp.log10,
    "log1p": jnp.log1p,
    "log2": jnp.log2,
    "logaddexp": jnp.logaddexp,
    "logaddexp2": jnp.logaddexp2,
    "logical_and": jnp.logical_and,
    "logical_not": jnp.logical_not,
    "logical_or": jnp.logical_or,
    "logical_xor": jnp.logical_xor,
    "lt.Scalar": jnp.less,
    "lt.Tensor": jnp.less,
    "maximum": jnp.maximum,
    "minimum": jnp.minimum,
    "mul.Tensor": jnp.multiply,
    "ne.Scalar": jnp.not_equal,
    "ne.Tensor": jnp.not_equal,
    "neg": jnp.negative,
    "reciprocal": jnp.reciprocal,
    "relu": lambda x: jnp.maximum(x, jnp.zeros((), x.dtype)),
    "remainder.Tensor": jnp.remainder,
    "round": jnp.round,
    "rsqrt": lax.rsqrt,
    "sgn": jnp.sign,
    "sigmoid": jax.nn.sigmoid,
    "sign": jnp.sign,
    "signbit": jnp.signbit,
    "silu": jax.nn.silu,
    "sin": jnp.sin,
    "sinh": jnp.sinh,
    "sqrt": jnp.sqrt,
    "tan": jnp.tan,
    "tanh": jnp.tanh,
    "trunc": jnp.trunc,
}
for _name, _fn in _TABLE.items():
    lower(_name, pointwise=True)(_fn)


@lower("add.Tensor", "add.Scalar", pointwise=True)
def add(self: Any, other: Any, alpha: Any = 1) -> Any:
    return self + scaled(other, alpha)


@lower("sub.Tensor", "sub.Scalar", pointwise=True)
def sub(self: Any, other: Any, alpha: Any = 1) -> Any:
    return self - scaled(other, alpha)


@lower("rsub.Tensor", "rsub.Scalar", pointwise=True)
def rsub(self: Any, other: Any, alpha: Any = 1) -> Any:
    return other - scaled(self, alpha)


@lower("mul.Scalar", pointwise=True)
def mul_scalar(self: Any, other: Any) -> Any:
    return self * other


@lower("div.Scalar", pointwise=True)
def div_scalar(self: Any, other: Any) -> Any:
    return jnp.true_divide(self, other)


@lower("div.Tensor_mode", "div.Scalar_mode", pointwise=True)
def div_mode(self: Any, other: Any, *, rounding_mode: str | None) -> Any:
    if rounding_mode is None:
        return jnp.true_divide(self, other)
    if rounding_mode == "floor":
        return jnp.floor_divide(self, other)
    if jnp.issubdtype(jnp.result_type(self), jnp.integer):
        return lax.div(*jnp.broadcast_arrays(self, jnp.asarray(other, self.dtype)))
    return jnp.trunc(jnp.true_divide(self, other))


@lower("pow.Tensor_Scalar", pointwise=True, static=("exponent",))
def pow_tensor_scalar(self: Any, exponent: Any) -> Any:
    if is_static(exponent) and not isinstance(exponent, complex):
        if exponent == int(exponent) and abs(exponent) <= 4 and not jnp.issubdtype(self.dtype, jnp.integer):
            return lax.integer_pow(self, int(exponent))
        if exponent == 0.5:
            return jnp.sqrt(self)
    return jnp.power(self, exponent)


@lower("pow.Tensor_Tensor", "pow.Scalar", pointwise=True)
def pow_tensor(self: Any, exponent: Any) -> Any:
    return jnp.power(self, exponent)


@lower("where.self", pointwise=True, promoted=("self", "other"))
def where(condition: Any, self: Any, other: Any) -> Any:
    return jnp.where(condition.astype(bool), self, other)


@lower("masked_fill.Scalar", "masked_fill.Tensor", pointwise=True, promoted=("self",))
def masked_fill(self: Any, mask: Any, value: Any) -> Any:
    return jnp.where(mask, jnp.asarray(value, self.dtype), self)


@lower("clamp", pointwise=True)
def clamp(self: Any, min: Any = None, max: Any = None) -> Any:
    if min is not None:
        self = jnp.maximum(self, min)
    return self if max is None else jnp.minimum(self, max)


@lower("lerp.Scalar", "lerp.Tensor", pointwise=True)
def lerp(self: Any, end: Any, weight: Any) -> Any:
    return self + weight * (end - self)


@lower("addcmul", pointwise=True)
def addcmul(self: Any, tensor1: Any, tensor2: Any, *, value: Any = 1) -> Any:
    return self + scaled(tensor1 * tensor2, value)


@lower("addcdiv", pointwise=True)
def addcdiv(self: Any, tensor1: Any, tensor2: Any, *, value: Any = 1) -> Any:
    return self + scaled(tensor1 / tensor2, value)


@lower("gelu", pointwise=True)
def gelu(self: Any, *, approximate: str = "none") -> Any:
    return jax.nn.gelu(self, approximate=approximate == "tanh")


@lower("gelu_backward", pointwise=True)
def gelu_backward(grad_output: Any, self: Any, *, approximate: str = "none") -> Any:
    return jax.vjp(lambda x: gelu(x, approximate=approximate), self)[1](grad_output)[0]


@lower("tanh_backward", pointwise=True)
def tanh_backward(grad_output: Any, output: Any) -> Any:
    return grad_output * (1 - output * output)


@lower("sigmoid_backward", pointwise=True)
def sigmoid_backward(grad_output: Any, output: Any) -> Any:
    return grad_output * (output * (1 - output))


@lower("threshold_backward", pointwise=True, promoted=("grad_output", "self"))
def threshold_backward(grad_output: Any, self: Any, threshold: Any) -> Any:
    return jnp.where(self <= threshold, jnp.zeros((), grad_output.dtype), grad_output)
