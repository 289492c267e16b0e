"""Meshes over all devices, whatever their number: what tests use that run on 1, 4 and 8 devices."""

from __future__ import annotations

import mesh


def line(axis: str | None = "data") -> mesh.Mesh:
    """All devices along one axis."""
    count = mesh.device_count()
    return mesh.Mesh(range(count), (count,), None if axis is None else (axis,))


def grid(names: tuple[str, str] | None = ("data", "model"), reverse: bool = False) -> mesh.Mesh:
    """All devices, two along the second axis where there are four or more; `reverse`: in descending order."""
    count = mesh.device_count()
    inner = 2 if count >= 4 else 1
    ids = list(reversed(range(count))) if reverse else range(count)
    return mesh.Mesh(ids, (count // inner, inner), names)
