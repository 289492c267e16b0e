"""Reads the parts of arrays that a process needs, compares their checksums, and places them on devices.

reader.want(number, sharding)       # while the state is compared
reader.read()                       # then all at once; raises before anything has changed
reader.sharded(number, sharding)    # a jax.Array

Each request is answered once. The bytes of an array are freed with its last answer, so that a state that is restored array by array is
not in memory a second time at the end.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from mesh.platform._allocator import mapped_memory
from spmd.base._errors import CheckpointError, message
from spmd.checkpoint import _files
from spmd.checkpoint._boxes import Box, whole
from spmd.checkpoint._inventory import damaged
from spmd.checkpoint._manifest import ArrayEntry, Manifest, Piece
from spmd.checkpoint._placement import assembled, boxes_on
from spmd.checkpoint._tree import malformed, numpy_dtype

_READERS = 4
_LARGE = 2**16  # bytes, from which on an array has memory of its own


@dataclass
class Reader:
    """Collects requests for arrays of one step, reads them, and returns their values.

    Attributes:
        manifest: of the step.
        store: of the step's folder.
        bytes_read: bytes of arrays read so far.
    """

    manifest: Manifest
    store: _files.Store
    _wanted: dict[int, dict[Box, Any]] = field(default_factory=dict[int, dict[Box, Any]])
    _open: Counter[int] = field(default_factory=Counter[int])  # requests that are not answered yet, by the array's number
    bytes_read: int = 0

    def entry(self, number: int) -> ArrayEntry:
        """The entry of an array in the manifest.

        Raises:
            CheckpointError: the manifest has no array of this number.
        """
        if number >= len(self.manifest.arrays):
            raise malformed(f"its state refers to array {number}, but there are {len(self.manifest.arrays)}")
        return self.manifest.arrays[number]

    def want(self, number: int, sharding: jax.sharding.Sharding | None) -> None:
        """Request an array: its shards on this process's devices, or with None the whole array on the host."""
        shape = self.entry(number).shape
        boxes = [whole(shape)] if sharding is None else boxes_on(sharding, shape)
        self._wanted.setdefault(number, {}).update(dict.fromkeys(boxes))
        self._open[number] += 1

    def read(self) -> None:
        """Read everything that was requested.

        Raises:
            CheckpointError: a piece is unreadable, or its checksum does not match.
        """
        with ThreadPoolExecutor(_READERS, "checkpoint reader") as pool:
            jobs = [pool.submit(self._read_piece, *job) for number in sorted(self._wanted) for job in self._jobs(number)]
            for job in jobs:
                job.result()

    def _jobs(self, number: int) -> list[tuple[ArrayEntry, Piece, list[tuple[dict[Box, Any], Box]]]]:
        """The pieces of an array to read, each with the boxes that it overlaps. Allocates the boxes that are not pieces."""
        entry, wanted = self.entry(number), self._wanted[number]
        dtype = numpy_dtype(entry.dtype)
        exact = {piece.box for piece in entry.pieces}
        for box in wanted:
            if box not in exact:
                wanted[box] = _empty(box.shape, dtype)
        found: list[tuple[ArrayEntry, Piece, list[tuple[dict[Box, Any], Box]]]] = []
        for piece in entry.pieces:
            boxes = [(wanted, box) for box in wanted if box.overlap(piece.box) is not None]
            if boxes:
                found.append((entry, piece, boxes))
        return found

    def _read_piece(self, entry: ArrayEntry, piece: Piece, boxes: Sequence[tuple[dict[Box, Any], Box]]) -> None:
        """Read and check one piece, and copy it to the boxes that overlap it. A box equal to the piece's is not copied."""
        boxed = [(wanted, box) for wanted, box in boxes if box != piece.box]
        exact = [(wanted, box) for wanted, box in boxes if box == piece.box]
        values = _empty(piece.box.shape, numpy_dtype(entry.dtype))
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
        """Read one array now, without `want` and `read`."""
        self.want(number, None)
        for job in self._jobs(number):
            self._read_piece(*job)
        return self.host(number)

    def host(self, number: int) -> np.ndarray[Any, Any]:
        """A whole array that was read, on the host."""
        return self._answer(number)[whole(self.entry(number).shape)]

    def sharded(self, number: int, sharding: jax.sharding.Sharding, dtype: np.dtype[Any] | None = None) -> jax.Array:
        """An array that was read, on this process's devices; converted to `dtype` unless it is None."""
        entry, parts = self.entry(number), self._answer(number)
        values = {box: parts[box] for box in boxes_on(sharding, entry.shape)}
        return assembled(sharding, entry.shape, values, numpy_dtype(entry.dtype) if dtype is None else dtype)

    def _answer(self, number: int) -> Mapping[Box, Any]:
        """The values of an array, for one request. They are not kept after the last one."""
        self._open[number] -= 1
        return self._wanted[number] if self._open[number] else self._wanted.pop(number)


def _empty(shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    """A new array; a large one is given back to the kernel when it is freed. See Note [Memory that is given back]."""
    num_bytes = math.prod(shape) * dtype.itemsize
    return np.frombuffer(mapped_memory(num_bytes), dtype).reshape(shape) if num_bytes >= _LARGE else np.empty(shape, dtype)


__all__ = ["Reader"]
