"""Matrix products of consecutive groups of rows of different sizes, as in a mixture of experts.

`offs` contains the end of each group, so no group size is needed on the host. The product is `lax.ragged_dot`, for which TPUs and GPUs
have kernels. Rows after the last group belong to no group; their results are undefined in torch, and zero here.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax

from spmd.lowering._registry import lower


@lower("_grouped_mm")
def _grouped_mm(self: Any, mat2: Any, offs: Any = None, bias: Any = None, out_dtype: Any = None) -> Any:
    """Product of the groups; `offs` (int [groups]) splits the dim that the ranks determine.

    self [m, k] and mat2 [groups, k, n]: the rows of self.
    self [groups, m, k] and mat2 [k, n]: the columns of mat2.
    self [m, k] and mat2 [k, n]: k; the result is [groups, m, n].
    self and mat2 both 3-d: nothing; `offs` is None.
    """
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
