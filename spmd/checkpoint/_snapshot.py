"""A snapshot of a state's bytes, cut into pieces and packed into files, in memory that no later step overwrites.

A compiled step donates the memory of the state to the next one, so an asynchronous save copies the state first. The memory of
the copies is reused by the next save, because allocating a gigabyte from the system takes longer than copying it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import numpy as np

from spmd.checkpoint._boxes import Box
from spmd.checkpoint._collect import Leaf

_COPIERS = 4
PACK_BYTES = 32 * 2**20  # maximum bytes of a data file; a larger shard becomes several pieces


class HostPiece(NamedTuple):
    """Row-major bytes of one box of array number `leaf`."""

    leaf: int
    box: Box
    data: memoryview


@dataclass
class Staging:
    """Host memory that all asynchronous saves into one folder reuse.

    Attributes:
        blocks: the allocated memory, as arrays of bytes.
    """

    blocks: list[np.ndarray[Any, Any]]
    _at: int = 0
    _used: int = 0
    _waiting: list[tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]] = field(default_factory=list[Any])

    def place_for(self, data: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Reserve memory for a copy of `data`, which `copy` makes."""
        while self._at < len(self.blocks) and len(self.blocks[self._at]) - self._used < len(data):
            self._at, self._used = self._at + 1, 0
        if self._at == len(self.blocks):
            self.blocks.append(np.empty(max(len(data), PACK_BYTES), np.uint8))
        place = self.blocks[self._at][self._used : self._used + len(data)]
        self._used += len(data)
        self._waiting.append((place, data))
        return place

    def copy(self) -> None:
        """Make all reserved copies, on several threads, since one does not saturate the memory bus."""
        with ThreadPoolExecutor(_COPIERS, "checkpoint-copy") as pool:
            for done in [pool.submit(np.copyto, *pair) for pair in self._waiting]:
                done.result()
        self._waiting.clear()

    def rewind(self) -> None:
        """Make the memory free for new copies. Blocks that the last save did not use are deallocated."""
        del self.blocks[self._at + 1 :]
        self._at = self._used = 0


def pieces_of(leaves: Sequence[Leaf], index: int, size: int, staging: Staging | None) -> list[HostPiece]:
    """The pieces that process `index` of `size` writes, in the order of the leaves.

    Args:
        staging: memory to copy the bytes to. None refers to the arrays' own memory where possible.
    """
    shards = [(number, box, data) for number, leaf in enumerate(leaves) for box, data in leaf.shards(index, size)]
    for _, _, data in shards:
        if isinstance(data, jax.Array):
            data.copy_to_host_async()
    pieces = [piece for number, box, data in shards for piece in _cut(number, box, data, staging)]
    if staging is not None:
        staging.copy()
    return pieces


def _cut(number: int, box: Box, data: Any, staging: Staging | None) -> Iterator[HostPiece]:
    host = np.asarray(data)
    octets = np.ascontiguousarray(host).reshape(-1).view(np.uint8)
    if staging is not None and isinstance(data, jax.Array) and _is_shared(data):
        octets = staging.place_for(octets)
    at = 0
    for piece in box.pieces(max(1, PACK_BYTES // host.dtype.itemsize)):
        end = at + piece.size * host.dtype.itemsize
        yield HostPiece(number, piece, octets.data[at:end])
        at = end


def _is_shared(array: jax.Array) -> bool:
    """Whether `np.asarray` returns the device's own memory instead of a copy."""
    return next(iter(array.devices())).platform == "cpu"


def packed(pieces: Sequence[HostPiece]) -> Iterator[list[HostPiece]]:
    """Group the pieces, in order, into files of at most `PACK_BYTES`."""
    group: list[HostPiece] = []
    total = 0
    for piece in pieces:
        if group and total + len(piece.data) > PACK_BYTES:
            yield group
            group, total = [], 0
        group.append(piece)
        total += len(piece.data)
    if group:
        yield group


__all__ = ["PACK_BYTES", "HostPiece", "Staging", "packed", "pieces_of"]
