"""The process's current mesh, which functions that take `mesh=None` fall back on. The one place that keeps it.

spmd.set_global_mesh(spmd.get_1d_mesh("data"))
spmd.get_global_mesh()                              # Mesh(data=8)
"""

from __future__ import annotations

from mesh import Mesh, MeshError, device_count
from spmd.base._errors import message

_current: list[Mesh] = []  # of at most one; not a ContextVar: threads that load data see it too


def set_global_mesh(mesh: Mesh) -> None:
    """Make `mesh` the process's current mesh."""
    _current[:] = [mesh]


def get_global_mesh() -> Mesh | None:
    """The process's current mesh, or None if none was set."""
    return _current[0] if _current else None


def get_1d_mesh(axis_name: str | None = None) -> Mesh:
    """All devices along one axis, called `axis_name` ("0" without one)."""
    count = device_count()
    return Mesh(range(count), (count,), None if axis_name is None else (axis_name,))


def mesh_or_global(mesh: Mesh | None, what: str) -> Mesh:
    """`mesh`, else the current one; MeshError (a ValueError) naming `what` if there is neither."""
    found = get_global_mesh() if mesh is None else mesh
    if found is None:
        raise MeshError(message(f"{what} was given no mesh, and no global mesh is set", fix="pass mesh=, or spmd.set_global_mesh(m)"))
    return found
