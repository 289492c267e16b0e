"""Finds the mesh axis for a purpose (tensor parallelism, FSDP, batch) by its name."""

from __future__ import annotations

from collections.abc import Sequence

from mesh import Mesh
from spmd.base._errors import SpmdError, message

MODEL_AXES = ("model", "tensor", "tp")
FSDP_AXES = ("fsdp", "shard", "data", "dp")
# Axes that never split the batch; every other axis does.
_NOT_BATCH = frozenset(
    (*MODEL_AXES, "expert", "experts", "ep", "sequence", "seq", "sp", "context", "cp", "pipeline", "pipe", "stage", "pp")
)


def megatron_axis(mesh: Mesh) -> str:
    """The axis for tensor parallelism: the first of `MODEL_AXES` that the mesh has, or its only axis.

    Raises:
        SpmdError: the mesh has several axes and none of these names.
    """
    return _axis(mesh, MODEL_AXES, "tensor parallelism")


def fsdp_axis(mesh: Mesh) -> str:
    """The axis that FSDP shards over: the first of `FSDP_AXES` that the mesh has, or its only axis.

    Raises:
        SpmdError: the mesh has several axes and none of these names.
    """
    return _axis(mesh, FSDP_AXES, "FSDP")


def batch_axes(mesh: Mesh, model_axis: str | None = None, fsdp: str | None = None) -> tuple[str, ...]:
    """The axes that split the batch: all but the model, expert, sequence and pipeline axes. `fsdp` is always one of them."""
    return tuple(a for a in mesh.axis_names if a == fsdp or (a != model_axis and a not in _NOT_BATCH))


def _axis(mesh: Mesh, names: Sequence[str], purpose: str) -> str:
    if len(mesh.axis_names) == 1:
        return mesh.axis_names[0]
    for name in names:
        if name in mesh.axis_names:
            return name
    raise SpmdError(
        message(
            f"{mesh} has no axis for {purpose}",
            f"axes of the mesh: {', '.join(map(repr, mesh.axis_names))}; looked for: {', '.join(map(repr, names))}",
            fix=f"name an axis {names[0]!r}, or write the rules with your own names",
        )
    )


__all__ = ["batch_axes", "fsdp_axis", "megatron_axis"]
