"""Meshes as torch_xla's programs expect them: `axis_names` is None if none were given, and errors start with torch_xla's text."""

from __future__ import annotations

import ast
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from mesh import HybridMesh as OurHybridMesh
from mesh import Mesh as OurMesh
from mesh import MeshError, ShardingSpec, device_count
from spmd.base import _counters
from spmd.base._errors import message
from spmd.compat.torch_xla import _runtime
from spmd.compat.torch_xla._caller import is_user


class Mesh(OurMesh):
    """`spmd.Mesh`, with the differences that the module's docstring names.

    Raises:
        MeshError: the arguments do not fit each other (an AssertionError too while the modules are installed).
    """

    def __init__(self, device_ids: Any, mesh_shape: Sequence[int], axis_names: Sequence[str] | None = None, **options: Any) -> None:
        _require_fit(np.asarray(device_ids).ravel().tolist(), tuple(mesh_shape), axis_names)
        super().__init__(device_ids, mesh_shape, axis_names, **options)
        self.__dict__["_has_names"] = axis_names is not None

    @property
    def axis_names(self) -> Any:
        """The names, one per axis. The program sees None if it gave none."""
        return None if not self.__dict__["_has_names"] and is_user(1) else self.__dict__["axis_names"]

    @axis_names.setter
    def axis_names(self, names: tuple[str, ...]) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        self.__dict__["axis_names"] = names
        self.__dict__.setdefault("_has_names", True)

    @classmethod
    def from_str(cls, mesh_str: str) -> Mesh | None:
        """The mesh of `str(mesh)`: torch_xla's dict of ids, shape and names, or 'data=4,model=2'; None for any other text."""
        return mesh_of_text(mesh_str)


class HybridMesh(Mesh, OurHybridMesh):  # pyright: ignore[reportIncompatibleVariableOverride]
    """`spmd.HybridMesh`, changed like `Mesh` here. Device coordinates come from `torch_xla.runtime`."""

    def __init__(
        self,
        *,
        ici_mesh_shape: Sequence[int],
        dcn_mesh_shape: Sequence[int] | None = None,
        axis_names: Sequence[str] | None = None,
        **options: Any,
    ) -> None:
        attributes = _runtime_module().global_runtime_device_attributes()
        if "device_attributes" not in options and all("coords" in device for device in attributes):
            options["device_attributes"] = attributes
        OurHybridMesh.__init__(self, ici_mesh_shape, dcn_mesh_shape, axis_names, **options)


def mesh_of_text(text: str) -> Mesh | None:
    """See `Mesh.from_str`."""
    try:
        found = ast.literal_eval(text.removeprefix("Mesh"))
        return Mesh(found["device_ids"], found["mesh_shape"], found["axis_names"])
    except (ValueError, SyntaxError, KeyError, TypeError):  # not a dict: perhaps "data=4,model=2", the text of our meshes
        return _mesh_of_sizes(text)


def _mesh_of_sizes(text: str) -> Mesh | None:
    try:
        ours = OurMesh.from_string(text)
    except MeshError:
        return None
    return Mesh(ours.device_ids, ours.mesh_shape, ours.axis_names)


def get_1d_mesh(axis_name: str | None = None) -> Mesh:
    """All devices along one axis."""
    count = device_count()
    return Mesh(range(count), (count,), None if axis_name is None else (axis_name,))


def op_sharding(mesh: OurMesh, partition_spec: Any) -> ShardingSpec:
    """`mesh.get_op_sharding(spec)`: the layout, created and counted once per mesh and spec."""
    made: dict[Any, ShardingSpec] = mesh.__dict__.setdefault("_op_shardings", {})
    key = tuple(tuple(entry) if isinstance(entry, list | tuple) else entry for entry in partition_spec)
    if key not in made:
        made[key] = ShardingSpec(mesh, partition_spec)
        _counters.count("CreateOpSharding")
    return made[key]


def _runtime_module() -> Any:
    """The module through `sys.modules`, where tests may replace functions."""
    import sys

    return sys.modules.get("torch_xla.runtime", _runtime)


def _require_fit(ids: list[Any], shape: tuple[int, ...], axis_names: Sequence[str] | None) -> None:
    size = math.prod(shape)
    if axis_names is not None and len(axis_names) != len(shape):
        what = f"Number of axis names ({len(axis_names)}) must match mesh dimensions ({len(shape)})"
        raise MeshError(message(what, f"names {tuple(axis_names)}, shape {shape}", fix="pass one name per axis"))
    if axis_names is not None and len(set(axis_names)) != len(axis_names):
        raise MeshError(message("Axis names must be unique", f"got {tuple(axis_names)}", fix="give every axis its own name"))
    if len(ids) != size:
        what = f"Number of device IDs ({len(ids)}) must match mesh size ({size})"
        raise MeshError(message(what, f"shape {shape}", fix=f"pass {size} ids, e.g. range({size})"))
    if len(set(ids)) != len(ids):
        raise MeshError(message("Device IDs must be unique", f"got {ids}", fix="name every device once"))
    if size == device_count() and ids and max(ids) >= size:
        raise MeshError(message("Device IDs must be less than mesh size", f"got {ids}, the size is {size}", fix=f"range({size})"))
