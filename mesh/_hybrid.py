"""HybridMesh: a mesh over several slices, fast links (ICI) inside a slice and slow ones (DCN) between them.

    HybridMesh(ici_mesh_shape=(1, 4, 1), dcn_mesh_shape=(2, 1, 1), axis_names=("data", "fsdp", "tensor"))

Which device lies where is read from the devices; on CPU, where none lies anywhere, slices and coordinates are simulated, so
that a program for a pod of slices can be tried on a laptop. Knows nothing of tensors.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import numpy.typing as npt
from jax.experimental import mesh_utils

from mesh import _devices
from mesh._mesh import Mesh
from mesh._mesh_errors import MeshError, message

DeviceAttributes = Mapping[str, Any]


class HybridMesh(Mesh):
    """A mesh in which each axis has a part inside a slice (ICI) and a part across slices (DCN). Order the axes by increasing traffic.

    Args:
        ici_mesh_shape: size of each axis inside one slice.
        dcn_mesh_shape: size of each axis across slices; their product is the number of slices. None: one slice.
        axis_names: one name per axis.
        device_attributes: the location of each device, as returned by `device_attributes()`: `name` ("TPU:3"), `coords` (x, y, z) and,
            with several slices, `slice_index`. None: those of the devices in use; on CPU they are simulated.

    Raises:
        MeshError: the shapes do not fit each other, the devices or the number of slices.
    """

    ici_mesh_shape: tuple[int, ...]
    dcn_mesh_shape: tuple[int, ...]
    device_attributes: tuple[DeviceAttributes, ...]

    def __init__(
        self,
        ici_mesh_shape: Sequence[int],
        dcn_mesh_shape: Sequence[int] | None = None,
        axis_names: Sequence[str] | None = None,
        *,
        device_attributes: Sequence[DeviceAttributes] | None = None,
    ) -> None:
        ici = tuple(int(size) for size in ici_mesh_shape)
        dcn = (1,) * len(ici) if dcn_mesh_shape is None else tuple(int(size) for size in dcn_mesh_shape)
        if len(ici) != len(dcn):
            raise MeshError(
                message(f"ici_mesh_shape={ici} and dcn_mesh_shape={dcn} differ in length", fix="give one size per axis in both, 1 for none")
            )
        attributes = _read(device_attributes) if device_attributes is not None else _found(ici, dcn)
        ids = _arranged(attributes, ici, dcn)
        super().__init__(ids.ravel(), [i * d for i, d in zip(ici, dcn, strict=True)], axis_names)
        object.__setattr__(self, "ici_mesh_shape", ici)
        object.__setattr__(self, "dcn_mesh_shape", dcn)
        object.__setattr__(self, "device_attributes", attributes)


def device_attributes() -> list[dict[str, Any]]:
    """The attributes of each device in use, in order: `name`, and its location if known (`coords`, `core_on_chip`, `slice_index`)."""
    known: list[dict[str, Any]] = []
    for position, device in enumerate(_devices.devices()):
        attributes: dict[str, Any] = {"name": f"{device.platform.upper()}:{position}"}
        for key in ("coords", "core_on_chip", "slice_index"):
            value = getattr(device, key, None)
            if value is not None:
                attributes[key] = list(value) if key == "coords" else value
        known.append(attributes)
    return known


def simulated_slices(num_slices: int, slice_shape: Sequence[int]) -> list[dict[str, Any]]:
    """Attributes of devices that form `num_slices` boxes of chips, for `HybridMesh(device_attributes=...)`.

    Args:
        num_slices: how many slices; with one, the devices name none, as on real hardware.
        slice_shape: chips along x, y and z of one slice; up to three sizes.
    """
    box = (*slice_shape, 1, 1)[:3]
    places = itertools.product(range(num_slices), *(range(size) for size in reversed(box)))
    attributes: list[dict[str, Any]] = []
    for position, (slice_index, z, y, x) in enumerate(places):
        attributes.append({"name": f"TPU:{position}", "coords": [x, y, z], "core_on_chip": 0})
        if num_slices > 1:
            attributes[-1]["slice_index"] = slice_index
    return attributes


def _found(ici: tuple[int, ...], dcn: tuple[int, ...]) -> tuple[DeviceAttributes, ...]:
    found = device_attributes()
    if all("coords" in attributes for attributes in found):
        if math.prod(dcn) == 1:  # one slice may name itself; only different ones make a pod of slices
            indices = {attributes.pop("slice_index", 0) for attributes in found}
            if len(indices) > 1:
                raise MeshError(
                    message(
                        f"the devices are in {len(indices)} slices, but dcn_mesh_shape={dcn} is for one slice", fix="give dcn_mesh_shape"
                    )
                )
        return tuple(found)
    # Devices in order along a line of chips per slice: any logical shape can be cut from it without a change of order.
    return tuple(simulated_slices(math.prod(dcn), (math.prod(ici),)))


def _read(given: Sequence[DeviceAttributes]) -> tuple[DeviceAttributes, ...]:
    for attributes in given:
        if "coords" not in attributes or "name" not in attributes:
            raise MeshError(message(f"{dict(attributes)} lacks the location of the device", fix="give 'name' and 'coords' of every device"))
    return tuple(sorted(given, key=lambda attributes: int(str(attributes["name"]).rpartition(":")[2])))


def _arranged(attributes: tuple[DeviceAttributes, ...], ici: tuple[int, ...], dcn: tuple[int, ...]) -> npt.NDArray[np.int64]:
    """Device ids in the shape of the mesh, by jax's own placement of logical axes on the torus."""
    slices = sorted({cast("int", a.get("slice_index", 0)) for a in attributes})
    if math.prod(dcn) != len(slices):
        raise MeshError(
            message(
                f"dcn_mesh_shape={dcn} is for {math.prod(dcn)} slices",
                f"the devices are in {len(slices)}",
                fix=f"a product of {len(slices)}",
            )
        )
    if math.prod(ici) * len(slices) != len(attributes):
        raise MeshError(
            message(
                f"ici_mesh_shape={ici} is for slices of {math.prod(ici)} devices",
                f"there are {len(attributes)} devices in {len(slices)} slices",
                fix=f"a product of {len(attributes) // len(slices)}",
            )
        )
    chips = [_stand_in(position, held) for position, held in enumerate(attributes)]
    if len(slices) > 1:
        placed = mesh_utils.create_hybrid_device_mesh(ici, dcn, chips, allow_split_physical_axes=True)
    else:
        placed = mesh_utils.create_device_mesh(ici, chips, allow_split_physical_axes=True)
    return np.vectorize(lambda chip: chip.id, otypes=[np.int64])(placed)


def _stand_in(position: int, attributes: DeviceAttributes) -> Any:
    """What jax's placement asks of a device. Its kind is one that has no hand-made order: only the coordinates speak."""
    return SimpleNamespace(
        id=position,
        platform="tpu",
        device_kind="chip of a torus",
        coords=tuple(attributes["coords"]),
        core_on_chip=attributes.get("core_on_chip", 0),
        slice_index=attributes.get("slice_index", 0),
        process_index=0,
    )
