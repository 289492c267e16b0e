"""Converts a torch `DeviceMesh` of device type "jax", also a sliced or flattened one, to a Mesh and axes of it.

    m = init_device_mesh("jax", (2, 4), mesh_dim_names=("dp", "tp"))
    mesh_axes(m["tp"])                       # Mesh(dp=2, tp=4) and its axis 'tp'
    mesh_axes(m["dp", "tp"]._flatten())      # the same Mesh and its axes ('dp', 'tp')

In torch a submesh is the row that contains the calling rank. In a single program it is an axis of the whole mesh. All meshes
cut out of one root therefore mean one Mesh. Its axes are the root's or, if a root axis was divided (`_unflatten`), the coarsest
axes from which all of them can be composed.
"""

from __future__ import annotations

import itertools
import math
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from mesh import Mesh, MeshError
from spmd.base._errors import message

_AXES = "_spmd_axes"  # attribute of a root mesh: name -> digits of every axis cut out of it, the root's own axes first
Digits = tuple[tuple[int, int], ...]  # (size, stride) over the root's positions, slowest first
_roots: weakref.WeakValueDictionary[Mesh, Any] = weakref.WeakValueDictionary()


@dataclass(frozen=True)
class MeshAxes:
    """The Mesh and the axes that a DeviceMesh stands for.

    Attributes:
        mesh: the mesh over all devices of the root.
        axes: for each dim of the DeviceMesh the axes of `mesh` that it spans, slowest first; empty for a dim of size 1.
    """

    mesh: Mesh
    axes: tuple[tuple[str, ...], ...]

    @property
    def names(self) -> tuple[str, ...]:
        """All axes, flattened."""
        return tuple(name for axes in self.axes for name in axes)


def is_of_devices(device_mesh: Any) -> bool:
    """Whether `device_mesh` is a torch `DeviceMesh` of device type "jax"."""
    return getattr(device_mesh, "device_type", None) == "jax" and hasattr(device_mesh, "_get_root_mesh")


def note_axes(device_mesh: Any) -> None:
    """Record on the root mesh the axes of `device_mesh`, a mesh cut out of it or the root itself."""
    known: dict[str, Digits] = vars(device_mesh._get_root_mesh()).setdefault(_AXES, {})
    for name, digits in zip(_names(device_mesh), _digits(device_mesh), strict=True):
        known.setdefault(name, digits)


def mesh_axes(device_mesh: Any) -> MeshAxes:
    """The Mesh of the root of a DeviceMesh of type "jax", and the axes of it that the DeviceMesh has.

    Raises:
        MeshError: the meshes cut out of one root cannot be composed of common axes.
        DeviceError: it names devices that do not exist.
    """
    root = device_mesh._get_root_mesh()
    known: dict[str, Digits] = vars(root).get(_AXES) or dict(zip(_names(root), _digits(root), strict=True))
    own = dict(zip(_names(root), _digits(root), strict=True))
    grid = {name: digits[0] for name, digits in own.items() if digits}
    if any(_made_of(digits, grid) is None for digits in known.values()):
        grid = _common_grid(known, math.prod(root.shape))
        sizes = {name: 1 for name, digits in known.items() if not digits} | {name: size for name, (size, _) in grid.items()}
    else:
        sizes = {name: digits[0][0] if digits else 1 for name, digits in own.items()}
    mesh = Mesh(root._rank_map.tolist(), tuple(sizes.values()), tuple(sizes))
    _roots.setdefault(mesh, root)
    axes: list[tuple[str, ...]] = []
    for name, digits in zip(_names(device_mesh), _digits(device_mesh), strict=True):
        found = _made_of(digits, grid) if digits else (name,) if name in sizes else ()
        if found is None:
            what = f"axis {name!r} of {device_mesh} cannot be composed of the axes of {mesh}"
            raise MeshError(message(what, fix="make a new mesh: init_device_mesh('jax', shape, mesh_dim_names=names)"))
        axes.append(found)
    return MeshAxes(mesh, tuple(axes))


def root_of(mesh: Mesh) -> Any:
    """The first DeviceMesh that was made over `mesh`, or None."""
    return _roots.get(mesh)


def _names(device_mesh: Any) -> tuple[str, ...]:
    return tuple(device_mesh.mesh_dim_names or map(str, range(len(device_mesh.shape))))


def _digits(device_mesh: Any) -> list[Digits]:
    """The digits of each dim: how it counts through the root's positions."""
    with torch.device("cpu"):
        positions = device_mesh._layout.remap_to_tensor(torch.arange(device_mesh._rank_map.numel()))[0]
    return [_mixed_radix(positions.movedim(dim, 0).reshape(size, -1)[:, 0].tolist()) for dim, size in enumerate(device_mesh.shape)]


def _mixed_radix(positions: Sequence[int]) -> Digits:
    """The digits, (size, stride), that enumerate these positions. Positions begin at 0; a single one has no digits."""
    found: list[tuple[int, int]] = []
    step = 1
    while step < len(positions):
        stride, size = positions[step], 1
        while step * size < len(positions) and positions[step * size] == stride * size:
            size += 1
        found.append((size, stride))
        step *= size
    return tuple(reversed(found))


def _made_of(digits: Digits, grid: dict[str, tuple[int, int]]) -> tuple[str, ...] | None:
    """The axes of `grid`, slowest first, that enumerate the same positions as `digits`; None if no axes do."""
    found: list[str] = []
    for size, stride in digits:
        within = [(name, axis) for name, axis in grid.items() if stride <= axis[1] < stride * size]
        within.sort(key=lambda named: -named[1][1])
        if math.prod(axis[0] for _, axis in within) != size or within[-1][1][1] != stride:
            return None
        found.extend(name for name, _ in within)
    return tuple(found)


def _common_grid(known: dict[str, Digits], num_devices: int) -> dict[str, tuple[int, int]]:
    """The coarsest axes from which all known axes can be composed, named like the first equal known axis, else by stride."""
    ends = {stride * size for digits in known.values() for size, stride in digits}
    cuts = sorted({1, num_devices, *ends, *(stride for digits in known.values() for _, stride in digits)})
    grid: dict[str, tuple[int, int]] = {}
    for low, high in reversed(list(itertools.pairwise(cuts))):
        if high % low:
            raise MeshError(
                message(
                    "axes cut out of one mesh cannot be composed of common axes", f"they cut its positions at {cuts}", fix="make two meshes"
                )
            )
        axis = (high // low, low)
        grid[next((name for name, digits in known.items() if digits == (axis,)), f"stride{low}")] = axis
    return grid


__all__ = ["MeshAxes", "is_of_devices", "mesh_axes", "note_axes", "root_of"]
