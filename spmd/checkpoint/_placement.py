"""Places the parts of an array on this process's devices. Uneven dims are padded in their last shards."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from spmd.base._convert import exact_dtypes
from spmd.checkpoint._boxes import Box, box_of, whole
from spmd.device._arrays import stored_shape


def boxes_on(sharding: jax.sharding.Sharding, shape: tuple[int, ...]) -> list[Box]:
    """The distinct shards on this process's devices, without padding."""
    return list(dict.fromkeys(unpadded for _, unpadded in _parts(sharding, shape).values() if unpadded is not None))


def assembled(sharding: jax.sharding.Sharding, shape: tuple[int, ...], values: Mapping[Box, Any], dtype: np.dtype[Any]) -> jax.Array:
    """Build an array on the devices, padded as its tensor stores it.

    Args:
        shape: shape without padding.
        values: host arrays for the boxes of `boxes_on`.
        dtype: the values are converted to this dtype.
    """
    converted = {box: value.astype(dtype, copy=False) for box, value in values.items()}
    pieces: list[jax.Array] = []
    with exact_dtypes():
        for device, (box, unpadded) in _parts(sharding, shape).items():
            if unpadded == box:
                piece = converted[box]
            else:
                piece = np.zeros(box.shape, dtype)
                if unpadded is not None:
                    piece[unpadded.within(box)] = converted[unpadded]
            pieces.append(jax.device_put(piece, device))
        return jax.make_array_from_single_device_arrays(stored_shape(shape, sharding), sharding, pieces)


def _parts(sharding: jax.sharding.Sharding, shape: tuple[int, ...]) -> dict[Any, tuple[Box, Box | None]]:
    """The shard of the padded array on each device, and the part of it that is not padding (None if all of it is)."""
    stored = stored_shape(shape, sharding)
    found: dict[Any, tuple[Box, Box | None]] = {}
    for device, index in sharding.addressable_devices_indices_map(stored).items():
        box = box_of(index or (), stored)
        found[device] = box, box.overlap(whole(shape))
    return found


__all__ = ["assembled", "boxes_on"]
