"""Code that Dynamo does not look into: what makes device 'jax' what it is, and jax. To Dynamo its operators are operators.

`mark_sharding` (spmd/sharding) is looked into: it says in a graph what it is. A function of `spmd.compile` that is called in a function
under `torch.compile` ends the graph there, and runs as its own program.
"""

from __future__ import annotations

from spmd.base._torch_late import skip_in_dynamo

SKIPPED = (
    "jax",
    "jaxlib",
    "mesh.job",
    "mesh.platform",
    # not `_torch`, which tells Dynamo where a graph ends
    *(f"spmd.base.{name}" for name in ("_convert", "_errors", "_exact", "_jax", "_open_sizes", "_settings", "_underway")),
    "spmd.device",
    "spmd.lowering",
    "spmd.patches",
    "spmd.program",
    "spmd.checkpoint",
    "spmd.dynamo",
)


def register() -> None:
    """From now on Dynamo skips it."""
    for name in SKIPPED:
        skip_in_dynamo(name)


__all__ = ["SKIPPED", "register"]
