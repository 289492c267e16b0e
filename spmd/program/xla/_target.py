"""Where a program runs: on the one mesh that its tensors are marked over, or on one device."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding

from mesh import Mesh, ShardingSpec
from spmd.base._errors import SpmdError, message
from spmd.device._storage import Buffer


def common_mesh(annotations: Iterable[ShardingSpec | None]) -> Mesh | None:
    """The one mesh that buffers with these annotations lie on; SpmdError if they lie on different devices."""
    found: Mesh | None = None
    for annotation in annotations:
        if annotation is None:
            continue
        here = annotation.mesh
        if found is None:
            found = here
        elif list(found.device_ids) != list(here.device_ids) or found.topology != here.topology:
            raise SpmdError(
                message(
                    "one program uses tensors on two meshes with different devices",
                    f"{found} has devices {[int(i) for i in found.device_ids]}, {here} has {[int(i) for i in here.device_ids]}",
                    fix="mark all tensors of a step over meshes of the same devices in the same order",
                )
            )
    return found


def program_mesh(buffers: Sequence[Buffer], layouts: Iterable[ShardingSpec]) -> Mesh | None:
    """The mesh of a program with these buffers, which constrains values to these layouts: the one that buffers are marked over, or else
    that of a layout inside, or else the one over which another program has left a value.

    Raises:
        SpmdError: buffers are marked over several, of different devices.
    """
    marked = common_mesh(b.annotation for b in buffers)
    others = (*(spec.mesh for spec in layouts), *map(mesh_of, (b.value for b in buffers)))
    return marked or next((mesh for mesh in others if mesh is not None), None)


def mesh_of(value: Any) -> Mesh | None:
    """The mesh that an array lies over, if that is more than one device."""
    sharding = getattr(value, "sharding", None)
    found: Any = sharding.mesh if isinstance(sharding, NamedSharding) and sharding.num_devices > 1 else None
    return None if found is None else Mesh.from_jax(found)


def platform_of(mesh: Mesh | None) -> str:
    """'cpu', 'gpu' or 'tpu': of the mesh's devices, which may be elsewhere, or of the device at hand."""
    return jax.default_backend() if mesh is None else mesh.to_jax().devices.flat[0].platform


def target_text(mesh: Mesh | None) -> str:
    """What follows "compiling train_step": " for v5e:2x4", " over data=4, model=2", or nothing on one device."""
    if mesh is None:
        return ""
    return f" for {mesh.topology}" if mesh.topology is not None else " over " + ", ".join(f"{a}={n}" for a, n in mesh.shape().items())


def likely_platform(buffers: Iterable[Buffer]) -> str:
    """That of the first mesh that a tensor is marked over: before the trace says which of the tensors the program uses."""
    return platform_of(next((b.annotation.mesh for b in buffers if b.annotation is not None), None))


def lies_on(value: jax.Array, mesh: Mesh) -> bool:
    """Whether an array lies on as many devices as a mesh has, by a layout over a mesh."""
    sharding = value.sharding
    return isinstance(sharding, NamedSharding) and sharding.mesh.size == mesh.size() and not sharding.mesh.empty
