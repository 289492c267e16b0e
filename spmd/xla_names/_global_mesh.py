"""The process's global mesh, the default of functions that take `mesh=None`. It is stored only here.

spmd.set_global_mesh(spmd.get_1d_mesh("data"))
spmd.get_global_mesh()                              # Mesh(data=8)
"""

from __future__ import annotations

from typing import Any

from mesh import Mesh, MeshError, device_count
from spmd.base._errors import message
from spmd.sharding._annotate import as_mesh

_current: list[Mesh] = []  # at most one mesh; not a ContextVar, so that data-loading threads see it too


def set_global_mesh(mesh: Any) -> None:
    """Make `mesh` the process's global mesh.

    Args:
        mesh: a `mesh.Mesh`, a `jax.sharding.Mesh` or a torch `DeviceMesh`.

    Raises:
        SpmdError: `mesh` is none of these.
    """
    _current[:] = [as_mesh(mesh)]


def get_global_mesh() -> Mesh | None:
    """The process's global mesh, or None if none was set."""
    return _current[0] if _current else None


def get_1d_mesh(axis_name: str | None = None) -> Mesh:
    """A mesh of all devices along one axis, named `axis_name` ("0" if None)."""
    count = device_count()
    return Mesh(range(count), (count,), None if axis_name is None else (axis_name,))


def mesh_or_global(mesh: Mesh | None, what: str) -> Mesh:
    """`mesh`, else the global mesh. Raises MeshError (a ValueError) with the caller's name `what` if there is neither."""
    found = get_global_mesh() if mesh is None else mesh
    if found is None:
        raise MeshError(message(f"{what} was given no mesh, and no global mesh is set", fix="pass mesh=, or spmd.set_global_mesh(m)"))
    return found
