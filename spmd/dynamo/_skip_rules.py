"""Tells Dynamo which code to skip: the implementation of device 'jax', and jax. Dynamo sees its operators as opaque operators.

`mark_sharding` (spmd/sharding) is not skipped, because it becomes an operator in the graph. A call of a `spmd.compile` function inside
`torch.compile` breaks the graph there and runs as its own program.
"""

from __future__ import annotations

from typing import Any

from spmd.base._torch_late import only_inlined_by_dynamo, skip_in_dynamo
from spmd.sharding._tensor import XLAShardedTensor

SKIPPED = (
    "jax",
    "jaxlib",
    "mesh.job",
    "mesh.platform",
    # not `_torch`, which makes Dynamo's graph breaks
    *(f"spmd.base.{name}" for name in ("_convert", "_errors", "_exact", "_jax", "_open_sizes", "_settings", "_progress")),
    "spmd.device",
    "spmd.lowering",
    "spmd.patches",
    "spmd.program",
    "spmd.checkpoint",
    "spmd.dynamo",
)


def register() -> None:
    """Make Dynamo skip this code from now on."""
    for name in SKIPPED:
        skip_in_dynamo(name)
    function: Any = XLAShardedTensor.__torch_function__
    only_inlined_by_dynamo(function.__func__.__code__)


__all__ = ["SKIPPED", "register"]
