"""A torch `DeviceMesh` of device type "jax", a part of one or a flattened one, as a Mesh and axes of it.

    m = init_device_mesh("jax", (2, 4), mesh_dim_names=("dp", "tp"))
    mesh_axes(m["tp"])                       # Mesh(dp=2, tp=4) and its axis 'tp'
    mesh_axes(m["dp", "tp"]._flatten())      # the same Mesh and its axes ('dp', 'tp')

A submesh of torch's is one rank's row; to one program it is an axis of the whole. So all meshes cut out of one root mean one Mesh, whose
axes are the root's; or, where somebody has divided the root's axes (`_unflatten`), the coarsest axes that all of them are made of.
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

_AXES = "_spmd_axes"  # of a root mesh: name -> digits of each axis that was cut out of it, its own first
Digits = tuple[tuple[int, int], ...]  # (size, stride) among the root's positions, slowest first
_roots: weakref.WeakValueDictionary[Mesh, Any] = weakref.WeakValueDictionary()


@dataclass(frozen=True)
class MeshAxes:
    """What a DeviceMesh means.

    Attributes:
        mesh: over all devices of its root.
        axes: for each dim of the DeviceMesh the axes of `mesh` that it runs through, slowest first; empty for one of size 1.
    """

    mesh: Mesh
    axes: tuple[tuple[str, ...], ...]

    @property
    def names(self) -> tuple[str, ...]:
        """All of these axes."""
        return tuple(name for axes in self.axes for name in axes)


def is_of_devices(device_mesh: Any) -> bool:
    """Whether it is a torch `DeviceMesh` of device type "jax"."""
    return getattr(device_mesh, "device_type", None) == "jax" and hasattr(device_mesh, "_get_root_mesh")


def note_axes(device_mesh: Any) -> None:
    """Let the root know the axes of a mesh that was cut out of it, or its own."""
    known: dict[str, Digits] = vars(device_mesh._get_root_mesh()).setdefault(_AXES, {})
    for name, digits in zip(_names(device_mesh), _digits(device_mesh), strict=True):
        known.setdefault(name, digits)


def mesh_axes(device_mesh: Any) -> MeshAxes:
    """The Mesh that a DeviceMesh of type "jax" is a part of, and which of its axes it has.

    Raises:
        MeshError: meshes that were cut out of one root have no axes in common.
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
            what = f"axis {name!r} of {device_mesh} is not made of axes of {mesh}"
            raise MeshError(message(what, fix="make the mesh anew: init_device_mesh('jax', shape, mesh_dim_names=names)"))
        axes.append(found)
    return MeshAxes(mesh, tuple(axes))


def root_of(mesh: Mesh) -> Any:
    """The DeviceMesh that was made first over a Mesh, or None."""
    return _roots.get(mesh)


def _names(device_mesh: Any) -> tuple[str, ...]:
    return tuple(device_mesh.mesh_dim_names or map(str, range(len(device_mesh.shape))))


def _digits(device_mesh: Any) -> list[Digits]:
    """How each dim counts through the root's positions."""
    with torch.device("cpu"):
        positions = device_mesh._layout.remap_to_tensor(torch.arange(device_mesh._rank_map.numel()))[0]
    return [_mixed_radix(positions.movedim(dim, 0).reshape(size, -1)[:, 0].tolist()) for dim, size in enumerate(device_mesh.shape)]


def _mixed_radix(positions: Sequence[int]) -> Digits:
    """(size, stride) of the digits that count out these positions, which begin at 0; none for one position."""
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
    """The axes of a grid, slowest first, that count as these digits do; None if there are none."""
    found: list[str] = []
    for size, stride in digits:
        within = [(name, axis) for name, axis in grid.items() if stride <= axis[1] < stride * size]
        within.sort(key=lambda named: -named[1][1])
        if math.prod(axis[0] for _, axis in within) != size or within[-1][1][1] != stride:
            return None
        found.extend(name for name, _ in within)
    return tuple(found)


def _common_grid(known: dict[str, Digits], num_devices: int) -> dict[str, tuple[int, int]]:
    """The coarsest axes that all known ones are made of, by name: that of the first known axis alike, else their stride."""
    ends = {stride * size for digits in known.values() for size, stride in digits}
    cuts = sorted({1, num_devices, *ends, *(stride for digits in known.values() for _, stride in digits)})
    grid: dict[str, tuple[int, int]] = {}
    for low, high in reversed(list(itertools.pairwise(cuts))):
        if high % low:
            raise MeshError(
                message("axes that were cut out of one mesh do not fit each other", f"they divide it at {cuts}", fix="make two meshes")
            )
        axis = (high // low, low)
        grid[next((name for name, digits in known.items() if digits == (axis,)), f"stride{low}")] = axis
    return grid


__all__ = ["MeshAxes", "is_of_devices", "mesh_axes", "note_axes", "root_of"]
