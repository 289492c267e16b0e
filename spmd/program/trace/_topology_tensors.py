"""Tensors on a topology without local devices, which a trace takes as shapes because they have no array.

A tensor that is marked over the mesh of a topology is not uploaded. Instead of an array that jax would note as a constant, the trace gets
a tracer for it among its inputs, and `Program` lowers with its shape, dtype and sharding.
"""

from __future__ import annotations

import jax

from spmd.device._storage import Buffer


def on_topology(buffer: Buffer) -> bool:
    """Whether a buffer is marked over the mesh of a topology."""
    return buffer.annotation is not None and buffer.annotation.mesh.topology is not None


def waiting_for_topology(buffers: list[Buffer]) -> dict[Buffer, jax.ShapeDtypeStruct]:
    """The buffers without an array, each with its stored shape and dtype, for a program that is compiled and not run.

    Empty if no buffer is on a topology: then every buffer gets an array when the trace reads it.
    """
    if not any(map(on_topology, buffers)):
        return {}
    return {b: jax.ShapeDtypeStruct(b.stored, b.dtype) for b in buffers if b.value is None and b.host is not None}
