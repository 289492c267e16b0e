"""The four arithmetic operations on arrays, and limits; the quotient and the sum of a product
that are rounded once. The operations bypass jnp's jit if the operands already agree.

Every jnp function is jitted. Its first trace for new shapes takes 0.3 ms, a third of the time to trace a small training step.
Operands of equal dtype and shape, or of equal dtype where one is 0-dim, do not need jnp's promotion.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


def _direct(general: Callable[[Any, Any], Any], primitive: Callable[[Any, Any], Any], *, is_exact: bool) -> Callable[[Any, Any], Any]:
    """`general(x, y)`, computed by `primitive` if both are floating or complex arrays (`is_exact`: also integers) that agree."""
    kinds = jnp.number if is_exact else jnp.inexact

    def operation(x: Any, y: Any) -> Any:
        if not (isinstance(x, jax.Array) and isinstance(y, jax.Array) and x.dtype == y.dtype and jnp.issubdtype(x.dtype, kinds)):
            return general(x, y)
        if x.shape == y.shape:
            return primitive(x, y)
        if not x.shape:
            return primitive(lax.broadcast(x, y.shape), y)
        return primitive(x, lax.broadcast(y, x.shape)) if not y.shape else general(x, y)

    return operation


add = _direct(jnp.add, lax.add, is_exact=True)
sub = _direct(jnp.subtract, lax.sub, is_exact=True)
mul = _direct(jnp.multiply, lax.mul, is_exact=True)
div = _direct(jnp.true_divide, lax.div, is_exact=False)


def quotient(x: Any, number: Any) -> Any:
    """`x / number` for a 0-dim divisor, rounded once. XLA multiplies by the reciprocal of a divisor that all elements share."""
    return x / jnp.where(jnp.isnan(x), jnp.nan, number)


def fused_multiply_add(factor: Any, counts: Any, summand: Any) -> Any:
    """`factor * counts + summand` rounded once, as in the CPU's instruction, whether or not XLA uses one.

    Args:
        factor, summand: float32 or float64.
        counts: whole numbers below 2**24, of that dtype.
    """
    if factor.dtype == jnp.float32:
        factor, counts, summand = (value.astype(jnp.float64) for value in (factor, counts, summand))
        return (factor * counts + summand).astype(jnp.float32)
    high = lax.reduce_precision(factor, exponent_bits=11, mantissa_bits=23)  # products with 24 bits are exact
    product = high * counts
    total = product + summand
    rest = total - summand
    error = (summand - (total - rest)) + (product - rest)
    return jnp.where(jnp.isfinite(total), total + (error + (factor - high) * counts), total)


def at_least(x: Any, bound: Any) -> Any:
    """The larger of `x` and `bound`; NaN if one of them is. XLA's maximum of zeros is +0.0; torch's CPU keeps `x`, also if it is -0.0."""
    is_less = x < bound
    return jnp.where(is_less if _is_number(bound) else is_less | (bound != bound), bound, x)


def at_most(x: Any, bound: Any) -> Any:
    """The smaller of `x` and `bound`; see `at_least`."""
    is_more = x > bound
    return jnp.where(is_more if _is_number(bound) else is_more | (bound != bound), bound, x)


def _is_number(bound: Any) -> bool:
    """Whether a bound is known not to be NaN."""
    return isinstance(bound, (int, float)) and bound == bound


__all__ = ["add", "at_least", "at_most", "div", "fused_multiply_add", "mul", "quotient", "sub"]
