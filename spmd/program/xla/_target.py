"""The mesh and platform that a program runs on: the common mesh of its tensors, or one device."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax
from jax.sharding import NamedSharding

from mesh import Mesh, ShardingSpec
from mesh._devices import devices
from spmd.base._errors import SpmdError, message
from spmd.device._storage import Buffer


def common_mesh(annotations: Iterable[ShardingSpec | None]) -> Mesh | None:
    """The mesh of these annotations; None if all are None.

    Raises:
        SpmdError: the annotations have meshes with different devices or topologies, or with the same devices in another order.
    """
    found: Mesh | None = None
    for annotation in annotations:
        if annotation is None:
            continue
        here = annotation.mesh
        if found is None:
            found = here
        elif list(found.device_ids) != list(here.device_ids) or found.topology != here.topology:
            is_permuted = sorted(found.device_ids) == sorted(here.device_ids) and found.topology == here.topology
            differ = "the same devices in another order" if is_permuted else "different devices"
            raise SpmdError(
                message(
                    f"one program uses tensors on two meshes with {differ}",
                    f"{found} has devices {[int(i) for i in found.device_ids]}, {here} has devices {[int(i) for i in here.device_ids]}",
                    fix="mark all tensors of a step over meshes of the same devices in the same order",
                )
            )
    return found


def program_mesh(annotations: Iterable[ShardingSpec | None], layouts: Iterable[ShardingSpec], values: Iterable[Any]) -> Mesh | None:
    """The mesh of a program, or None for one device.

    It is the mesh that its buffers are marked over; otherwise the mesh of a layout; otherwise the mesh of an array in an unmarked buffer,
    which is the result of another program.

    Args:
        annotations: the layouts that its buffers are marked with.
        layouts: layouts to which it constrains values.
        values: the arrays in its buffers.

    Raises:
        SpmdError: the buffers are marked over meshes with different devices.
    """
    marked = common_mesh(annotations)
    others = (*(spec.mesh for spec in layouts), *map(mesh_of, values))
    return marked or next((mesh for mesh in others if mesh is not None), None)


def only_mesh(annotations: Iterable[ShardingSpec | None], values: Iterable[Any]) -> Mesh | None:
    """The mesh of all layouts, or without a layout that of all arrays; None if there is none, or several."""
    found = {spec.mesh for spec in annotations if spec is not None} or {mesh for mesh in map(mesh_of, values) if mesh is not None}
    return found.pop() if len(found) == 1 else None


def mesh_of(value: Any) -> Mesh | None:
    """The mesh of an array's sharding; None if the sharding is not over a mesh of several devices."""
    sharding = getattr(value, "sharding", None)
    found: Any = sharding.mesh if isinstance(sharding, NamedSharding) and sharding.num_devices > 1 else None
    return None if found is None else Mesh.from_jax(found)


def platform_of(mesh: Mesh | None) -> str:
    """'cpu', 'gpu' or 'tpu': the platform of the mesh's devices, which need not be attached, or of the default device."""
    return jax.default_backend() if mesh is None else mesh.to_jax().devices.flat[0].platform


def target_text(mesh: Mesh | None) -> str:
    """The suffix of "compiling train_step" in progress lines: " for v5e:2x4", " over data=4, model=2", or "" for one device."""
    if mesh is None:
        return ""
    return f" for {mesh.topology}" if mesh.topology is not None else " over " + ", ".join(f"{a}={n}" for a, n in mesh.shape().items())


def likely_platform(buffers: Iterable[Buffer]) -> str:
    """The platform of the first marked buffer. Before a trace it is unknown which of the buffers the program uses."""
    return platform_of(next((b.annotation.mesh for b in buffers if b.annotation is not None), None))


def lies_on(value: jax.Array, mesh: Mesh) -> bool:
    """Whether an array has a sharding over a mesh with as many devices as `mesh`."""
    sharding = value.sharding
    return isinstance(sharding, NamedSharding) and sharding.mesh.size == mesh.size() and not sharding.mesh.empty


def client() -> Any:
    """jax's client of the devices of this process."""
    first: Any = devices()[0]
    return first.client
