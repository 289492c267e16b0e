"""Where the parts of an array go on this process's devices. Dims that do not divide evenly are padded in the last parts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from spmd.base._convert import exact_dtypes
from spmd.checkpoint._boxes import Box, box_of, whole
from spmd.device._arrays import stored_shape


def boxes_on(sharding: jax.sharding.Sharding, shape: tuple[int, ...]) -> list[Box]:
    """The parts that this process's devices hold, each once, without padding."""
    return list(dict.fromkeys(held for _, held in _parts(sharding, shape).values() if held is not None))


def assembled(sharding: jax.sharding.Sharding, shape: tuple[int, ...], values: Mapping[Box, Any], dtype: np.dtype[Any]) -> jax.Array:
    """The array on the devices, padded as its tensor stores it.

    Args:
        shape: without padding.
        values: by the boxes of `boxes_on`; converted to `dtype`.
    """
    converted = {box: value.astype(dtype, copy=False) for box, value in values.items()}
    pieces: list[jax.Array] = []
    with exact_dtypes():
        for device, (box, held) in _parts(sharding, shape).items():
            if held == box:
                piece = converted[box]
            else:
                piece = np.zeros(box.shape, dtype)
                if held is not None:
                    piece[held.within(box)] = converted[held]
            pieces.append(jax.device_put(piece, device))
        return jax.make_array_from_single_device_arrays(stored_shape(shape, sharding), sharding, pieces)


def _parts(sharding: jax.sharding.Sharding, shape: tuple[int, ...]) -> dict[Any, tuple[Box, Box | None]]:
    """For each device its part of the padded array, and what of it is no padding."""
    stored = stored_shape(shape, sharding)
    found: dict[Any, tuple[Box, Box | None]] = {}
    for device, index in sharding.addressable_devices_indices_map(stored).items():
        box = box_of(index or (), stored)
        found[device] = box, box.overlap(whole(shape))
    return found


__all__ = ["assembled", "boxes_on"]
