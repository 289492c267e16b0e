"""A tensor cut into tiles, and the devices on which each tile is: an immutable value from which pictures are drawn.

Tiling.of_spec(ShardingSpec(m, ("data", None)), (64, 16))
Tiling.of_string("{devices=[2,2]0,1,2,3}")             # as XLA and torch_xla write shardings
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mesh import Mesh, ShardingSpec, device_count, entry_axes
from spmd.base._errors import SpmdError, message

_DEVICES = re.compile(r"\{devices=\[([\d,]+)\](?:<=\[([\d,]+)\](?:T\(([\d,]+)\))?|([\d,]+))\s*(.*?)\}")
_TRAILING = re.compile(r"(last_tile_dim_replicate|last_tile_dims=\{(.*)\})?")


@dataclass(frozen=True, eq=False)
class Tiling:
    """The tiles of a tensor.

    Attributes:
        title: title of the picture.
        names: a label for each dim: "dim 0", or the name of a mesh axis.
        sizes: sizes of the dims; None if only the number of tiles is known.
        devices: device ids, of shape [tiles along dim 0, ..., copies of each tile].
    """

    title: str
    names: tuple[str, ...]
    sizes: tuple[int, ...] | None
    devices: npt.NDArray[np.int64]

    @property
    def tiles(self) -> tuple[int, ...]:
        """Number of tiles along each dim."""
        return self.devices.shape[:-1]

    @property
    def copies(self) -> int:
        """Number of devices on which each tile is."""
        return self.devices.shape[-1]

    def range_text(self, dim: int, tile: int) -> str:
        """The range of a tile along a dim, such as "16:32"; the number of the tile if sizes are unknown."""
        if self.sizes is None:
            return str(tile)
        piece = -(-self.sizes[dim] // self.tiles[dim])
        return f"{min(tile * piece, self.sizes[dim])}:{min((tile + 1) * piece, self.sizes[dim])}"

    @classmethod
    def of_spec(cls, sharding: ShardingSpec, shape: tuple[int, ...] | None, title: str = "") -> Tiling:
        """The tiles of a tensor of `shape`, or (None) of any tensor of the spec's rank."""
        ids, names = sharding.mesh.get_logical_mesh(), list(sharding.mesh.axis_names)
        per_dim = [[names.index(str(axis)) for axis in entry_axes(entry)] for entry in sharding.partition_spec]
        used = [axis for axes in per_dim for axis in axes]
        rest = [axis for axis in range(ids.ndim) if axis not in used]
        tiles = tuple(math.prod(ids.shape[axis] for axis in axes) for axes in per_dim)
        words = tuple(f"dim {dim}" + _over(sharding, dim) for dim in range(len(tiles)))
        return cls(title or str(sharding.partition_spec), words, shape, ids.transpose(used + rest).reshape(*tiles, -1))

    @classmethod
    def of_mesh(cls, mesh: Mesh) -> Tiling:
        """The devices of a mesh, each drawn as one tile."""
        return cls(str(mesh), tuple(mesh.axis_names), None, mesh.get_logical_mesh()[..., None])

    @classmethod
    def of_string(cls, text: str, num_devices: int | None = None) -> Tiling:
        """Parse a sharding as printed by XLA: tiled, partly replicated, replicated, maximal or manual.

        Args:
            num_devices: number of devices for "{replicated}" and "{manual}", which do not contain it; by default all devices.

        Raises:
            SpmdError: the text is not such a sharding.
        """
        stripped = text.strip()
        if stripped in ("{replicated}", "{manual}", ""):
            count = device_count() if num_devices is None else num_devices
            word = {"{manual}": "manual: each device has its own shard"}.get(stripped, "whole")
            return cls(stripped or "{replicated}", (word,), None, np.arange(count)[None])
        maximal = re.fullmatch(r"\{maximal device=(\d+)\}", stripped)
        if maximal:
            return cls(stripped, ("whole",), None, np.array([[int(maximal[1])]]))
        match = _DEVICES.fullmatch(stripped)
        if not match or not _TRAILING.fullmatch(match[5]):
            raise SpmdError(
                message(
                    f"{text!r} is not a sharding",
                    "known: {devices=[2,2]0,1,2,3}, {devices=[2,1,2]<=[4] last_tile_dim_replicate}, {replicated}, {maximal device=0}",
                    fix="pass a sharding as XLA or torch_xla prints it",
                )
            )
        tiles = [int(n) for n in match[1].split(",")]
        ids = _ids(match)
        if ids.size != math.prod(tiles):
            raise SpmdError(message(f"{text!r} lists {ids.size} devices for {math.prod(tiles)} tiles", fix="list one device per tile"))
        trailing = match[5].count(",") + 1 if match[5].startswith("last_tile_dims") else 1 if match[5] else 0
        own = tiles[: len(tiles) - trailing]
        return cls(stripped, tuple(f"dim {dim}" for dim in range(len(own))), None, ids.reshape(*own, -1))


def _over(sharding: ShardingSpec, dim: int) -> str:
    axes = entry_axes(sharding.partition_spec[dim])
    return f" over {' and '.join(map(str, axes))}" if axes else ""


def _ids(match: re.Match[str]) -> npt.NDArray[np.int64]:
    """The device ids of a tiled sharding, which are either listed or a transposed iota."""
    if match[4]:
        return np.array([int(n) for n in match[4].split(",") if n])
    shape = [int(n) for n in match[2].split(",")]
    order = [int(n) for n in match[3].split(",")] if match[3] else list(range(len(shape)))
    return np.arange(math.prod(shape)).reshape(shape).transpose(order).ravel()


def device_text(ids: npt.NDArray[np.int64]) -> str:
    """Format device ids briefly: "0", "0 2 4", "0-7", "0 8 … 56"."""
    found = [int(i) for i in ids]
    if len(found) > 2 and found == list(range(found[0], found[0] + len(found))):
        return f"{found[0]}-{found[-1]}"
    if len(found) > 4:
        return f"{found[0]} {found[1]} … {found[-1]}"
    return " ".join(map(str, found))


__all__ = ["Tiling", "device_text"]
