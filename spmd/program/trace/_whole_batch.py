"""Warns about a training step whose batch is not sharded, so that every device computes all of it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mesh import Mesh, entry_axes
from spmd.base._errors import message
from spmd.device._storage import Buffer
from spmd.program.trace._captured import Captured
from spmd.sharding._axes import batch_axes


def whole_batch(name: str, mesh: Mesh | None, captured: Captured, buffers: Sequence[Buffer], hosts: Sequence[torch.Tensor]) -> str | None:
    """The warning for a training step whose arguments are replicated along a batch axis of the mesh; None if they are not.

    Args:
        name: name of the step.
        mesh: its mesh, or None.
        captured: its trace.
        buffers: buffers of the device tensors among the arguments.
        hosts: the CPU tensors among the arguments.
    """
    if mesh is None or not captured.writes.stepped:
        return None
    layouts = [*captured.layouts, *(b.annotation for b in buffers if b.annotation is not None)]
    split = {axis for spec in layouts for entry in spec.partition_spec for axis in entry_axes(entry)}
    idle = [a for a in batch_axes(mesh) if mesh.axis_size(a) > 1 and a not in split]
    batches = [tuple(t.shape) for t in (*buffers, *hosts) if t.shape]
    if not idle or not batches or any(rows[0] < mesh.axis_size(idle[0]) for rows in batches):
        return None
    axes = ", ".join(map(repr, idle))
    return message(
        f"every device along {axes} of the mesh computes the whole batch in {name}: no argument is split over {axes}",
        f"arguments of shapes {', '.join(map(str, batches[:4]))}",
        fix=f"spmd.mark_sharding(x, mesh, ({idle[0]!r}, {', '.join(['None'] * (len(batches[0]) - 1))})) before the call",
    )


__all__ = ["whole_batch"]
