"""Powers of the numbers in a traced program.

Note [Powers on TPUs]. Adam corrects its moments by `1 - beta ** step`, computed in float64 as in Python. TPUs have no float64: XLA
expands each such operation into many float32 operations, and a power into 1,300. Its two powers were a third of a program with rolled
layers. An optimizer's step counter is a whole number, so its power is a loop of multiplications with 90 operations. Other exponents
use XLA's power.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from spmd.base._jax import counted_from
from spmd.device._storage import recording


def power(base: Any, exponent: Any) -> Any:
    """`base ** exponent` for Python numbers or 0-dim arrays. A square root uses XLA's root, at a hundredth of the cost of its power."""
    if isinstance(base, jax.Array) and not jnp.issubdtype(base.dtype, jnp.inexact):  # as Python converts an int to float
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
    """`base ** count` by squaring (Knuth, TAOCP 2, 4.6.3): one multiplication per pass, up to two passes per bit of `count`.

    Args:
        base: float64[].
        count: float32[]. The power of its fractional part, or of a negative count, is computed in float32.

    Returns:
        float64[].
    """
    left = jnp.maximum(count.astype(jnp.int32), 0)
    rest = jnp.power(base.astype(jnp.float32), count - left.astype(jnp.float32))  # 1 if there is no rest

    def step(state: tuple[Any, Any, Any]) -> tuple[Any, Any, Any]:
        found, square, left = state
        is_odd = (left & 1) == 1
        product = jnp.where(is_odd, found, square) * square
        return jnp.where(is_odd, product, found), jnp.where(is_odd, square, product), jnp.where(is_odd, left ^ 1, left >> 1)

    return lax.while_loop(lambda state: state[2] > 0, step, (rest.astype(jnp.float64), base, left))[0]


__all__ = ["power", "power_of_count"]
