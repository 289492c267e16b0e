"""Powers of numbers that a traced program computes.

Note [Powers on TPUs]. Adam corrects its moments by `1 - beta ** step`, in 64-bit floats as Python computes it. TPUs have none: XLA
makes each such operation many of 32-bit floats, of a power 1,300: a third of a program of rolled layers for its two. An optimizer's step
counter is a whole number, so there its power is a loop of multiplications, 90 operations. Other exponents keep XLA's power.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from spmd.base._jax import counted_from
from spmd.device._storage import recording


def power(base: Any, exponent: Any) -> Any:
    """`base ** exponent` of Python numbers or 0-dim arrays; a root is XLA's root, which is a hundredth of its power."""
    if isinstance(base, jax.Array) and not jnp.issubdtype(base.dtype, jnp.inexact):  # as Python's int is made a float
        base = base.astype(jnp.float64)
    if isinstance(base, jax.Array) and isinstance(exponent, float) and exponent == 0.5:
        return jnp.sqrt(base)
    recorder = recording.get()
    if recorder is not None and recorder.platform == "tpu" and isinstance(exponent, jax.Array):
        count = counted_from(exponent)
        if count is not None and count.dtype == jnp.float32 and recorder.is_counter(count):
            return power_of_count(jnp.asarray(base, jnp.float64), exponent.astype(jnp.float32))
    return base**exponent


def power_of_count(base: Any, count: Any) -> Any:
    """`base ** count` by squaring (Knuth, TAOCP 2, 4.6.3): one multiplication a pass, two passes for each bit of `count`.

    Args:
        base: float64[].
        count: float32[]. Where it is no whole number, or negative, the power of the rest is one of 32-bit floats.
    """
    left = jnp.maximum(count.astype(jnp.int32), 0)
    rest = jnp.power(base.astype(jnp.float32), count - left.astype(jnp.float32))  # 1 where there is none

    def step(state: tuple[Any, Any, Any]) -> tuple[Any, Any, Any]:
        found, square, left = state
        is_odd = (left & 1) == 1
        product = jnp.where(is_odd, found, square) * square
        return jnp.where(is_odd, product, found), jnp.where(is_odd, square, product), jnp.where(is_odd, left ^ 1, left >> 1)

    return lax.while_loop(lambda state: state[2] > 0, step, (rest.astype(jnp.float64), base, left))[0]


__all__ = ["power", "power_of_count"]
