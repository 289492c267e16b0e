"""Mesh: a grid of devices with named axes. Immutable.

    mesh = Mesh(range(8), (4, 2), ("data", "model"))
    mesh = Mesh.from_string("data=4,model=2")         # the same, from a command line
    mesh.axis_size("model")                           # 2
    mesh.to_jax()                                     # a jax.sharding.Mesh, all axes Auto

This module does not depend on tensors or shardings.
"""

from __future__ import annotations

import functools
import math
import re
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import jax
import numpy as np
import numpy.typing as npt

from mesh import _devices
from mesh._devices import Device
from mesh._mesh_errors import DeviceError, MeshError, message
from mesh._topology import topology_devices

# An axis name must not contain the separators of the string form, which could not be parsed otherwise.
_AXIS_NAME = re.compile(r"[^\s=,@]+")
_AXIS = re.compile(r"\s*([^\s=,@]+)\s*=\s*(\d+)\s*")


@dataclass(frozen=True, init=False, repr=False)
class Mesh:
    """A grid of devices with named axes. Hashable, compared by value.

    Args:
        device_ids: logical ids (positions in `mesh.devices()`) in the mesh's device order, without repetition.
        mesh_shape: size of each axis; the product equals the number of ids.
        axis_names: one name per axis. None: "0", "1", ...
        topology: name of a TPU slice to compile for ("v5e:16x16"). Programs over the mesh can then be compiled but not run, and
            the ids are positions in `mesh.topology_devices(topology)`.

    Raises:
        MeshError: an argument is malformed, or the arguments do not match each other.
        DeviceError: the mesh names devices that do not exist, or the topology is unknown.
    """

    _ids: tuple[int, ...]
    mesh_shape: tuple[int, ...]
    axis_names: tuple[str, ...]
    topology: str | None

    def __init__(
        self,
        device_ids: Sequence[int] | npt.NDArray[np.integer],
        mesh_shape: Sequence[int],
        axis_names: Sequence[str] | None = None,
        *,
        topology: str | None = None,
    ) -> None:
        shape = _checked_shape(mesh_shape)
        names = _checked_names(axis_names, shape)
        title = _title(names, shape)
        if topology is not None and not isinstance(topology, str):  # pyright: ignore[reportUnnecessaryIsInstance]  (a user's value)
            what = f"topology of {title} must be the name of a TPU slice, got {topology!r}"
            raise MeshError(message(what, fix=f'mesh.Mesh(range({math.prod(shape)}), {shape}, {names}, topology="v5e:2x4")'))
        object.__setattr__(self, "topology", topology)
        object.__setattr__(self, "_ids", _checked_ids(device_ids, shape, title, topology))
        object.__setattr__(self, "mesh_shape", shape)
        object.__setattr__(self, "axis_names", names)

    def __eq__(self, other: object) -> bool:
        # By value, whatever the class: a sharding read back from a jax.Array has a plain Mesh, while its annotation may have a HybridMesh.
        if not isinstance(other, Mesh):
            return NotImplemented
        return (self._ids, self.mesh_shape, self.axis_names) == (other._ids, other.mesh_shape, other.axis_names)

    @property
    def device_ids(self) -> npt.NDArray[np.int64]:
        """Logical ids in the mesh's device order, as a flat read-only array."""
        return self._id_array

    @property
    def devices(self) -> npt.NDArray[np.object_]:
        """The jax devices, as a read-only array in the shape of the mesh."""
        return self._device_array

    def size(self, axis: str | int | None = None) -> int:
        """Number of devices of the mesh, or along one axis (name or index)."""
        return math.prod(self.mesh_shape) if axis is None else self.axis_size(axis)

    def shape(self) -> OrderedDict[str, int]:
        """Size of each axis by name, in axis order. A method, as in torch_xla."""
        return OrderedDict(zip(self.axis_names, self.mesh_shape, strict=True))

    def get_logical_mesh(self) -> npt.NDArray[np.int64]:
        """Logical ids in the shape of the mesh."""
        return self._id_array.reshape(self.mesh_shape)

    def get_axis_name_idx(self, name: str) -> int | None:
        """Index of the axis, or None if the mesh has no such axis (as in torch_xla)."""
        return self.axis_names.index(name) if name in self.axis_names else None

    def axis_size(self, name: str | int) -> int:
        """Number of devices along one axis, which is given by name or index.

        Raises:
            MeshError: the mesh has no such axis.
        """
        return self.mesh_shape[self._axis_index(name)]

    def axis_groups(self, names: str | int | Sequence[str | int]) -> list[tuple[int, ...]]:
        """Replica groups of a collective over one or several axes.

        Args:
            names: one axis or several. Within a group, the index along the last one varies fastest.

        Returns:
            Groups of positions in the mesh's device order (0 .. size-1), not of device ids. Every position is in
            exactly one group.

        Raises:
            MeshError: the mesh has no such axis, or an axis is named twice.
        """
        listed = [names] if isinstance(names, str | int) else list(names)
        inner = [self._axis_index(name) for name in listed]
        if len(set(inner)) != len(inner):
            raise MeshError(message(f"{self} cannot be grouped over {listed}", "an axis is named twice", fix="name each axis once"))
        outer = [axis for axis in range(len(self.mesh_shape)) if axis not in inner]
        group_size = math.prod(self.mesh_shape[axis] for axis in inner)
        groups = np.arange(self.size()).reshape(self.mesh_shape).transpose(outer + inner).reshape(-1, group_size)
        return [tuple(int(position) for position in group) for group in groups]

    def to_jax(self) -> jax.sharding.Mesh:
        """The same mesh as a `jax.sharding.Mesh`. All axes are Auto, because ordinary torch models cannot be traced under Explicit axes."""
        return self._jax_mesh

    @classmethod
    def from_jax(cls, jax_mesh: jax.sharding.Mesh) -> Mesh:
        """Convert a jax mesh, whatever the types of its axes; `to_jax` gives Auto axes.

        Raises:
            MeshError: an axis is not named by a string.
            DeviceError: a device is not one of `mesh.devices()`.
        """
        logical_id = {device: position for position, device in enumerate(_devices.devices())}
        named = cast("list[Device]", jax_mesh.devices.ravel().tolist())
        unknown = [device for device in named if device not in logical_id]
        if unknown:
            raise DeviceError(
                message(
                    f"the jax mesh {dict(jax_mesh.shape)} contains device {unknown[0]}, which is not in use",
                    f"in use: {len(logical_id)} devices on platform {_devices.platform()!r}",
                    fix="build the jax mesh from mesh.devices()",
                )
            )
        return cls([logical_id[device] for device in named], jax_mesh.devices.shape, jax_mesh.axis_names)

    def to_dict(self) -> dict[str, object]:
        """The mesh as a JSON-serializable dict, which `from_dict` reads."""
        data: dict[str, object] = {
            "device_ids": list(self._ids),
            "mesh_shape": list(self.mesh_shape),
            "axis_names": list(self.axis_names),
        }
        return data if self.topology is None else {**data, "topology": self.topology}

    @classmethod
    def from_dict(cls, data: Mapping[str, object]) -> Mesh:
        """Create a mesh from the result of `to_dict`.

        Raises:
            MeshError: an entry is missing or malformed.
        """
        missing = {"device_ids", "mesh_shape", "axis_names"} - data.keys()
        if missing:
            raise MeshError(
                message("this dict is not a mesh", f"missing: {', '.join(sorted(missing))}", fix="write it with Mesh.to_dict()")
            )
        return cls(
            cast("Sequence[int]", data["device_ids"]),
            cast("Sequence[int]", data["mesh_shape"]),
            cast("Sequence[str]", data["axis_names"]),
            topology=cast("str | None", data.get("topology")),
        )

    def to_string(self) -> str:
        """The mesh as one line, which `from_string` reads: 'data=4,model=2', with '@7,6,...' for another device order and
        ' on v5e:2x4' for a topology."""
        axes = ",".join(f"{name}={size}" for name, size in self.shape().items())
        ordered = axes if self._is_default_order else f"{axes}@{','.join(map(str, self._ids))}"
        return ordered if self.topology is None else f"{ordered} on {self.topology}"

    @classmethod
    def from_string(cls, text: str) -> Mesh:
        """Create a mesh from text like 'data=4,model=2'. It has the first devices, unless ids follow after '@'.

        Args:
            text: axis sizes; then '@' and the device ids (optional); then ' on ' and a topology (optional).

        Raises:
            MeshError: the text is malformed, or the sizes and ids do not match.
            DeviceError: the mesh names devices that do not exist.
        """
        grid_text, _, topology = text.partition(" on ")
        axes_text, at, ids_text = grid_text.partition("@")
        axes = [_AXIS.fullmatch(part) for part in axes_text.split(",")]
        ids_valid = re.fullmatch(r"\s*\d+\s*(,\s*\d+\s*)*", ids_text) is not None
        if not all(axes) or (at and not ids_valid):
            raise MeshError(message(f"{text!r} is not a mesh", fix="write axis=size pairs, e.g. 'data=4,model=2' or 'data=2@1,0'"))
        names = [match[1] for match in axes if match]
        shape = [int(match[2]) for match in axes if match]
        ids = [int(part) for part in ids_text.split(",")] if at else range(math.prod(shape))
        return cls(ids, shape, names, topology=topology.strip() or None)

    def __str__(self) -> str:
        return _title(self.axis_names, self.mesh_shape, self.topology)

    def __repr__(self) -> str:
        ids = f"range({len(self._ids)})" if self._is_default_order else str(list(self._ids))
        topology = "" if self.topology is None else f", topology={self.topology!r}"
        return f"Mesh({ids}, {self.mesh_shape}, {self.axis_names}{topology})"

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple[Callable[[Mapping[str, object]], Mesh], tuple[dict[str, object]]]:
        # Unpickling calls the constructor, so a process with fewer devices refuses the mesh. No jax object is pickled.
        return Mesh.from_dict, (self.to_dict(),)

    def __copy__(self) -> Mesh:
        return self

    def __deepcopy__(self, memo: dict[int, object]) -> Mesh:
        return self

    @functools.cached_property
    def _hash(self) -> int:
        # Cached: the mesh of a pod has thousands of ids, and every jax cache lookup hashes the mesh.
        return hash((self._ids, self.mesh_shape, self.axis_names, self.topology))

    @functools.cached_property
    def _is_default_order(self) -> bool:
        return self._ids == tuple(range(len(self._ids)))

    @functools.cached_property
    def _id_array(self) -> npt.NDArray[np.int64]:
        ids = np.array(self._ids, dtype=np.int64)
        ids.setflags(write=False)
        return ids

    @functools.cached_property
    def _device_array(self) -> npt.NDArray[np.object_]:
        existing = _existing(self.topology)
        placed = np.empty(len(self._ids), dtype=object)
        placed[:] = [existing[i] for i in self._ids]
        placed = placed.reshape(self.mesh_shape)
        placed.setflags(write=False)
        return placed

    @functools.cached_property
    def _jax_mesh(self) -> jax.sharding.Mesh:
        auto = (jax.sharding.AxisType.Auto,) * len(self.mesh_shape)
        return jax.sharding.Mesh(self._device_array, self.axis_names, axis_types=auto)

    def _axis_index(self, axis: str | int) -> int:
        names = self.axis_names
        if axis in names:
            return names.index(axis)
        if isinstance(axis, int) and -len(names) <= axis < len(names):
            return axis % len(names)
        raise MeshError(message(f"{self} has no axis {axis!r}", f"axes: {', '.join(names)}", fix="use one of these axes"))


def init_device_mesh(device_type: str, mesh_shape: Sequence[int], *, mesh_dim_names: Sequence[str] | None = None) -> Mesh:
    """Create a mesh over the first devices, with the arguments of torch's function of the same name.

    Args:
        device_type: "jax", or the platform in use ("cpu", "tpu", "gpu" or "cuda").
        mesh_shape: size of each axis.
        mesh_dim_names: one name per axis; called `axis_names` elsewhere in this package.

    Raises:
        DeviceError: `device_type` is not the platform in use, or the mesh needs more devices than exist.
        MeshError: `mesh_shape` and `mesh_dim_names` are malformed or differ in length.
    """
    in_use = _devices.platform()
    wanted = "gpu" if device_type == "cuda" else device_type
    if wanted not in ("jax", in_use):
        raise DeviceError(
            message(
                f"init_device_mesh({device_type!r}, ...) requests a platform that is not in use",
                f"in use: {_devices.device_count()} devices on platform {in_use!r}",
                fix=f"init_device_mesh('jax', {tuple(mesh_shape)})",
            )
        )
    shape = _checked_shape(mesh_shape)
    return Mesh(range(math.prod(shape)), shape, mesh_dim_names)


def _existing(topology: str | None) -> tuple[Device, ...]:
    return _devices.devices() if topology is None else topology_devices(topology)


def _title(names: Sequence[str], shape: Sequence[int], topology: str | None = None) -> str:
    suffix = "" if topology is None else f" on {topology}"
    return f"Mesh({', '.join(f'{name}={size}' for name, size in zip(names, shape, strict=True))}){suffix}"


def _checked_shape(mesh_shape: Sequence[int]) -> tuple[int, ...]:
    sizes = np.asarray(mesh_shape)
    if sizes.ndim != 1 or sizes.size == 0 or sizes.dtype.kind not in "iu" or (sizes < 1).any():
        fix = 'pass device ids, then one positive size per axis, then names: mesh.Mesh(range(8), (4, 2), ("data", "model"))'
        raise MeshError(message(f"{mesh_shape!r} is not a mesh shape", fix=fix))
    return tuple(int(size) for size in sizes)


def _checked_names(axis_names: Sequence[str] | None, shape: tuple[int, ...]) -> tuple[str, ...]:
    if axis_names is None:
        return tuple(str(axis) for axis in range(len(shape)))
    if isinstance(axis_names, str):
        raise MeshError(message(f"axis_names={axis_names!r} is one string", fix=f"axis_names=({axis_names!r},)"))
    if not isinstance(axis_names, Iterable):  # pyright: ignore[reportUnnecessaryIsInstance]  (a user's value)
        raise MeshError(message(f"axis_names={axis_names!r} are no names", fix="pass one name per size"))
    names = tuple(axis_names)
    if len(names) != len(shape):
        raise MeshError(
            message(
                f"axis_names={names} does not fit mesh_shape={shape}",
                f"{len(names)} names, {len(shape)} sizes",
                fix="pass one name per size",
            )
        )
    for name in names:
        if not isinstance(name, str) or not _AXIS_NAME.fullmatch(name):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise MeshError(message(f"{name!r} is not an axis name", fix="use a string without spaces, '=', ',' or '@'"))
    if len(set(names)) != len(names):
        raise MeshError(message(f"axis_names={names} repeats a name", fix="give each axis a different name"))
    return names


def _checked_ids(
    device_ids: Sequence[int] | npt.NDArray[np.integer], shape: tuple[int, ...], title: str, topology: str | None
) -> tuple[int, ...]:
    size = math.prod(shape)
    if isinstance(device_ids, int):
        raise MeshError(
            message(f"{title} needs {size} device ids, got the number {device_ids}", fix=f"pass {size} ids, e.g. range({size})")
        )
    if not isinstance(device_ids, np.ndarray | Sequence):  # pyright: ignore[reportUnnecessaryIsInstance]  (a user's value)
        what = f"{title} needs {size} device ids, got {device_ids!r}"
        raise MeshError(message(what, fix=f"pass {size} ids, e.g. range({size})"))
    count = device_ids.size if isinstance(device_ids, np.ndarray) else len(device_ids)
    if count != size:
        raise MeshError(message(f"{title} needs {size} device ids, got {count}", fix=f"pass {size} ids, e.g. range({size})"))
    # Checked before a range becomes an array, so that "data=1000000000" does not fill the memory.
    _require_devices(size - 1, size, title, topology)
    ids = np.asarray(device_ids).ravel()
    if ids.dtype.kind not in "iu" or (ids < 0).any():
        fix = f"pass non-negative ints, e.g. range({size})"
        raise MeshError(message(f"{title} has invalid device ids", f"got {ids.tolist()}", fix=fix))
    values, counts = np.unique(ids, return_counts=True)
    if (counts > 1).any():
        repeated = values[counts > 1].tolist()
        raise MeshError(message(f"{title} names a device more than once", f"repeated ids: {repeated}", fix="list each device once"))
    _require_devices(int(ids.max()), size, title, topology)
    return tuple(int(i) for i in ids)


def _require_devices(last_id: int, size: int, title: str, topology: str | None) -> None:
    count = _devices.device_count() if topology is None else len(topology_devices(topology))
    if last_id < count:
        return
    names = f"{size} devices" if last_id == size - 1 else f"{size} devices up to id {last_id}"
    if topology is not None:
        details = [f"the mesh names {names}, topology {topology!r} has {count}"]
        raise DeviceError(message(f"{title} names devices that do not exist", *details, fix=f"a mesh of at most {count} devices"))
    virtual = f"mesh.virtual_devices({last_id + 1}) at the top of the program, or " if _devices.platform() == "cpu" else ""
    raise DeviceError(
        message(
            f"{title} names devices that do not exist",
            f"the mesh names {names}, {count} exist on platform {_devices.platform()!r}",
            fix=f"{virtual}a mesh of at most {count} devices",
        )
    )
