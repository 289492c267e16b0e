"""Reads the parts of arrays that a process needs, each byte checked, and lays them out over devices.

reader.want(number, boxes)          # while it is being found out what is needed
reader.read()                       # then everything at once; an error before anything was changed
reader.sharded(number, sharding)    # a jax.Array
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from spmd.base._errors import CheckpointError, message
from spmd.checkpoint import _files
from spmd.checkpoint._boxes import Box, whole
from spmd.checkpoint._inventory import damaged
from spmd.checkpoint._manifest import ArrayEntry, Manifest, Piece
from spmd.checkpoint._placement import assembled, boxes_on
from spmd.checkpoint._tree import malformed, numpy_dtype

_READERS = 4


@dataclass
class Reader:
    """What is wanted of one step, and then its values."""

    manifest: Manifest
    store: _files.Store
    _wanted: dict[int, dict[Box, Any]] = field(default_factory=dict[int, dict[Box, Any]])
    bytes_read: int = 0

    def entry(self, number: int) -> ArrayEntry:
        """What the manifest says of an array."""
        if number >= len(self.manifest.arrays):
            raise malformed(f"its state names array {number} of {len(self.manifest.arrays)}")
        return self.manifest.arrays[number]

    def want(self, number: int, sharding: jax.sharding.Sharding | None) -> None:
        """Ask for an array: the parts that this process's devices hold, or all of it on the host without a sharding."""
        shape = self.entry(number).shape
        boxes = [whole(shape)] if sharding is None else boxes_on(sharding, shape)
        self._wanted.setdefault(number, {}).update(dict.fromkeys(boxes))

    def read(self) -> None:
        """Read what was asked for.

        Raises:
            CheckpointError: a byte is not what was written.
        """
        with ThreadPoolExecutor(_READERS, "checkpoint reader") as pool:
            jobs = [pool.submit(self._read_piece, *job) for number in sorted(self._wanted) for job in self._jobs(number)]
            for job in jobs:
                job.result()

    def _jobs(self, number: int) -> list[tuple[ArrayEntry, Piece, list[tuple[dict[Box, Any], Box]]]]:
        entry, wanted = self.entry(number), self._wanted[number]
        dtype = numpy_dtype(entry.dtype)
        exact = {piece.box for piece in entry.pieces}
        for box in wanted:
            if box not in exact:
                wanted[box] = np.empty(box.shape, dtype)
        found: list[tuple[ArrayEntry, Piece, list[tuple[dict[Box, Any], Box]]]] = []
        for piece in entry.pieces:
            boxes = [(wanted, box) for box in wanted if box.overlap(piece.box) is not None]
            if boxes:
                found.append((entry, piece, boxes))
        return found

    def _read_piece(self, entry: ArrayEntry, piece: Piece, boxes: Sequence[tuple[dict[Box, Any], Box]]) -> None:
        """Check one piece and copy it to where it is wanted; one that is wanted as it is stays where it was read."""
        boxed = [(wanted, box) for wanted, box in boxes if box != piece.box]
        exact = [(wanted, box) for wanted, box in boxes if box == piece.box]
        values = np.empty(piece.box.shape, numpy_dtype(entry.dtype))
        octets = values.reshape(-1).view(np.uint8).data
        if self.store.read(self.manifest.files[piece.file].name, piece.offset, octets) != piece.crc32:
            raise CheckpointError(
                message(
                    damaged(entry.name, piece, self.manifest), fix="restore another step: `spmd ckpt verify` shows which steps are valid"
                )
            )
        self.bytes_read += piece.nbytes
        for wanted, box in boxed:
            part = box.overlap(piece.box)
            assert part is not None
            wanted[box][part.within(box)] = values[part.within(piece.box)]
        for wanted, box in exact:
            wanted[box] = values

    def whole(self, number: int) -> np.ndarray[Any, Any]:
        """One array, read now."""
        self.want(number, None)
        for job in self._jobs(number):
            self._read_piece(*job)
        return self._wanted.pop(number)[whole(self.entry(number).shape)]

    def host(self, number: int) -> np.ndarray[Any, Any]:
        """The whole array."""
        return self._wanted[number][whole(self.entry(number).shape)]

    def sharded(self, number: int, sharding: jax.sharding.Sharding, dtype: np.dtype[Any] | None = None) -> jax.Array:
        """The array on this process's devices; values converted to `dtype` if one is given."""
        entry, parts = self.entry(number), self._wanted[number]
        values = {box: parts[box] for box in boxes_on(sharding, entry.shape)}
        return assembled(sharding, entry.shape, values, numpy_dtype(entry.dtype) if dtype is None else dtype)


__all__ = ["Reader"]
