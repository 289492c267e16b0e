"""Matrix products of consecutive groups of rows of different sizes, as the experts of a mixture make them.

`offs` holds the end of each group, so the product never needs a size on the host: it is `lax.ragged_dot`, which TPUs and GPUs have
kernels for. Rows after the last group belong to none; torch leaves them undefined, here they are zero.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax

from spmd.lowering._registry import lower


@lower("_grouped_mm")
def _grouped_mm(self: Any, mat2: Any, offs: Any = None, bias: Any = None, out_dtype: Any = None) -> Any:
    """The dim that `offs` (int [groups]) splits: rows of self [m, k] with mat2 [groups, k, n]; columns of mat2 [k, n] with
    self [groups, m, k]; or k of self [m, k] and mat2 [k, n], which gives [groups, m, n]. Two 3-d tensors have no `offs`."""
    if self.ndim == 3 and mat2.ndim == 3:
        out = jnp.matmul(self, mat2)
    else:
        sizes = jnp.diff(offs, prepend=jnp.zeros(1, offs.dtype)).astype(jnp.int32)
        if mat2.ndim == 3:
            out = lax.ragged_dot(self, mat2, sizes)
        elif self.ndim == 3:
            out = lax.ragged_dot(mat2.T, self.transpose(0, 2, 1), sizes).T
        else:
            contracted = lax.RaggedDotDimensionNumbers((((1,), (0,)), ((), ())), lhs_ragged_dimensions=[1], rhs_group_dimensions=[])
            out = lax.ragged_dot_general(self, mat2, sizes, contracted)
    out = out if bias is None else out + bias
    return out if out_dtype is None else out.astype(out_dtype)
