"""Programs for chips that are not here: which tensors a trace must take as shapes because there is no array to read.

Marked over a mesh of a topology, a tensor is not uploaded; the trace then gets a tracer for it among its inputs instead of an
array that jax would note as a constant, and `Program` lowers with its shape, dtype and sharding.
"""

from __future__ import annotations

import jax

from spmd.device._storage import Buffer


def on_topology(buffer: Buffer) -> bool:
    """Whether it is marked over a mesh of chips that are not here."""
    return buffer.annotation is not None and buffer.annotation.mesh.topology is not None


def waiting_for_topology(buffers: list[Buffer]) -> dict[Buffer, jax.ShapeDtypeStruct]:
    """For a program that is compiled and not run: the buffers that have no array, each with its shape and dtype.

    Empty if no buffer lies on a topology: then every value gets an array when the trace reads it.
    """
    if not any(map(on_topology, buffers)):
        return {}
    return {b: jax.ShapeDtypeStruct(b.stored, b.dtype) for b in buffers if b.value is None and b.host is not None}
