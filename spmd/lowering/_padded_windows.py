"""Windows and paddings with another value than 0, over a dim that is sharded.

XLA's SPMD partitioner keeps what it has exchanged between devices for the windows of an operand, and reuses it for equal windows without
a look at the padding value: in `jax.jit(lambda x: (lax.cumsum(x), lax.cummax(x)))` of a sharded x, the second result is computed with the
zeros of the first one. So each padding value other than 0 has an operand of its own.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax


def apart(operand: Any, value: Any) -> Any:
    """The operand of a window, an array or a tuple of them, for the padding `value`: no operation with another value shares it."""
    found, _ = lax.optimization_barrier((operand, jnp.asarray(value)))
    return found


__all__ = ["apart"]
