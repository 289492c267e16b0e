"""Collectives between CPU processes (gloo): reduce-scatter is replaced, because it computes wrong numbers.

`jax.lax.psum_scatter` over gloo silently returns wrong sums for chunks of 4 to 8 MiB and more (jax#40830). All-reduce is
right at every size tried (tests/mesh/test_collectives.py compares all collectives with numpy from 1 KiB to 64 MiB), so on CPU it
is lowered to an all-reduce followed by a slice: the same sums for twice the bytes.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.interpreters import mlir

from mesh.platform._jax_runtime import reduce_scatter_p

_installed: list[bool] = []


def install() -> None:
    """Lower reduce-scatter on CPU as all-reduce and slice, in this process."""
    if _installed:
        return
    _installed.append(True)
    mlir.register_lowering(reduce_scatter_p, mlir.lower_fun(_summed_then_sliced, multiple_results=False), platform="cpu")


def _summed_then_sliced(
    x: Any, *, axis_name: Any, scatter_dimension: int, axis_index_groups: Any, axis_size: int, tiled: bool, **_: Any
) -> Any:
    total = jax.lax.psum(x, axis_name, axis_index_groups=axis_index_groups)
    index = jax.lax.axis_index(axis_name)
    if axis_index_groups is not None:
        place = {member: position for group in axis_index_groups for position, member in enumerate(group)}
        index = jnp.asarray([place[member] for member in range(len(place))])[index]
    size = x.shape[scatter_dimension] // axis_size
    piece = jax.lax.dynamic_slice_in_dim(total, index * size, size, scatter_dimension)
    return piece if tiled else jax.lax.squeeze(piece, [scatter_dimension])
