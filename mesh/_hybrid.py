"""HybridMesh: a mesh over several TPU slices, with fast links (ICI) inside each slice and slow ones (DCN) between slices.

    HybridMesh(ici_mesh_shape=(1, 4, 1), dcn_mesh_shape=(2, 1, 1), axis_names=("data", "fsdp", "tensor"))

The location of each device is read from jax's device attributes. CPU devices have no location, so their slices and coordinates
are simulated, and a program for several slices can be tried on a laptop. This module does not depend on tensors.
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
    """A mesh in which each axis has one size inside a slice (ICI) and one across slices (DCN). Order the axes by increasing traffic.

    Args:
        ici_mesh_shape: size of each axis inside one slice.
        dcn_mesh_shape: size of each axis across slices; the product is the number of slices. None: one slice.
        axis_names: one name per axis.
        device_attributes: the location of each device, as returned by `device_attributes()`: `name` ("TPU:3"), `coords` (x, y, z) and,
            with several slices, `slice_index`. None: read from the devices in use, or simulated on CPU.

    Raises:
        MeshError: the shapes do not match each other, the number of devices or the number of slices.
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
                message(
                    f"ici_mesh_shape={ici} and dcn_mesh_shape={dcn} differ in length",
                    fix="pass one size per axis in both, 1 for an axis that is not split at that level",
                )
            )
        attributes = _detected_attributes(ici, dcn) if device_attributes is None else _checked_attributes(device_attributes)
        ids = _assigned_ids(attributes, ici, dcn)
        super().__init__(ids.ravel(), [i * d for i, d in zip(ici, dcn, strict=True)], axis_names)
        object.__setattr__(self, "ici_mesh_shape", ici)
        object.__setattr__(self, "dcn_mesh_shape", dcn)
        object.__setattr__(self, "device_attributes", attributes)


def device_attributes() -> list[dict[str, Any]]:
    """Attributes of each device in use, ordered by id: `name`, and the location if known (`coords`, `core_on_chip`, `slice_index`)."""
    found: list[dict[str, Any]] = []
    for position, device in enumerate(_devices.devices()):
        attributes: dict[str, Any] = {"name": f"{device.platform.upper()}:{position}"}
        for key in ("coords", "core_on_chip", "slice_index"):
            value = getattr(device, key, None)
            if value is not None:
                attributes[key] = list(value) if key == "coords" else value
        found.append(attributes)
    return found


def simulated_slices(num_slices: int, slice_shape: Sequence[int]) -> list[dict[str, Any]]:
    """Attributes of the devices of `num_slices` identical slices, for `HybridMesh(device_attributes=...)`.

    Args:
        num_slices: number of slices. With one slice the attributes have no `slice_index`, as on real hardware.
        slice_shape: number of chips along x, y and z of one slice; up to three sizes.
    """
    box = (*slice_shape, 1, 1)[:3]
    locations = itertools.product(range(num_slices), *(range(size) for size in reversed(box)))
    attributes: list[dict[str, Any]] = []
    for position, (slice_index, z, y, x) in enumerate(locations):
        attributes.append({"name": f"TPU:{position}", "coords": [x, y, z], "core_on_chip": 0})
        if num_slices > 1:
            attributes[-1]["slice_index"] = slice_index
    return attributes


def _detected_attributes(ici: tuple[int, ...], dcn: tuple[int, ...]) -> tuple[DeviceAttributes, ...]:
    found = device_attributes()
    if all("coords" in attributes for attributes in found):
        if math.prod(dcn) == 1:  # devices of a single slice may have a slice_index too, so only different values are an error
            indices = {attributes.pop("slice_index", 0) for attributes in found}
            if len(indices) > 1:
                raise MeshError(
                    message(
                        f"the devices are in {len(indices)} slices, but dcn_mesh_shape={dcn} is for one slice",
                        fix=f"pass dcn_mesh_shape with the product {len(indices)}",
                    )
                )
        return tuple(found)
    # Each simulated slice is a line of chips, so every logical shape keeps the devices in order.
    return tuple(simulated_slices(math.prod(dcn), (math.prod(ici),)))


def _checked_attributes(given: Sequence[DeviceAttributes]) -> tuple[DeviceAttributes, ...]:
    for attributes in given:
        if "coords" not in attributes or "name" not in attributes:
            raise MeshError(message(f"{dict(attributes)} lacks the location of the device", fix="pass 'name' and 'coords' of every device"))
    return tuple(sorted(given, key=lambda attributes: int(str(attributes["name"]).rpartition(":")[2])))


def _assigned_ids(attributes: tuple[DeviceAttributes, ...], ici: tuple[int, ...], dcn: tuple[int, ...]) -> npt.NDArray[np.int64]:
    """Device ids in the shape of the mesh: jax's `mesh_utils` maps the logical axes to the axes of the torus."""
    slices = sorted({cast("int", a.get("slice_index", 0)) for a in attributes})
    if math.prod(dcn) != len(slices):
        raise MeshError(
            message(
                f"dcn_mesh_shape={dcn} is for {math.prod(dcn)} slices",
                f"the devices are in {len(slices)}",
                fix=f"pass dcn_mesh_shape with the product {len(slices)}",
            )
        )
    if math.prod(ici) * len(slices) != len(attributes):
        raise MeshError(
            message(
                f"ici_mesh_shape={ici} is for slices of {math.prod(ici)} devices",
                f"there are {len(attributes)} devices in {len(slices)} slices",
                fix=f"pass ici_mesh_shape with the product {len(attributes) // len(slices)}",
            )
        )
    chips = [_fake_device(position, each) for position, each in enumerate(attributes)]
    if len(slices) > 1:
        placed = mesh_utils.create_hybrid_device_mesh(ici, dcn, chips, allow_split_physical_axes=True)
    else:
        placed = mesh_utils.create_device_mesh(ici, chips, allow_split_physical_axes=True)
    return np.vectorize(lambda chip: chip.id, otypes=[np.int64])(placed)


def _fake_device(position: int, attributes: DeviceAttributes) -> Any:
    """Object with the device attributes that `mesh_utils` reads. It has no special order for this device_kind and uses the coordinates."""
    return SimpleNamespace(
        id=position,
        platform="tpu",
        device_kind="chip of a torus",
        coords=tuple(attributes["coords"]),
        core_on_chip=attributes.get("core_on_chip", 0),
        slice_index=attributes.get("slice_index", 0),
        process_index=0,
    )
