"""The bytes of a state at one moment, in memory that no later step touches, cut into pieces and packed into files.

A compiled step gives its state's memory to the next step's, so an asynchronous save copies first. The copies' memory is kept
for the next save: to get a gigabyte of fresh memory from the system takes longer than to copy it.
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
PACK_BYTES = 32 * 2**20  # of a data file, about; a larger shard becomes several pieces


class HostPiece(NamedTuple):
    """Row-major bytes of one box of array number `leaf`."""

    leaf: int
    box: Box
    data: memoryview


@dataclass
class Staging:
    """Host memory that is used again by every asynchronous save."""

    blocks: list[np.ndarray[Any, Any]]
    _at: int = 0
    _used: int = 0
    _waiting: list[tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]] = field(default_factory=list[Any])

    def place_for(self, data: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Memory of ours that will hold the same bytes after `copy`."""
        while self._at < len(self.blocks) and len(self.blocks[self._at]) - self._used < len(data):
            self._at, self._used = self._at + 1, 0
        if self._at == len(self.blocks):
            self.blocks.append(np.empty(max(len(data), PACK_BYTES), np.uint8))
        place = self.blocks[self._at][self._used : self._used + len(data)]
        self._used += len(data)
        self._waiting.append((place, data))
        return place

    def copy(self) -> None:
        """Copy all for which there is a place, on several threads: one does not fill the memory bus."""
        with ThreadPoolExecutor(_COPIERS, "checkpoint-copy") as pool:
            for done in [pool.submit(np.copyto, *pair) for pair in self._waiting]:
                done.result()
        self._waiting.clear()

    def rewind(self) -> None:
        """Forget the copies; blocks that the last save did not need are given back."""
        del self.blocks[self._at + 1 :]
        self._at = self._used = 0


def pieces_of(leaves: Sequence[Leaf], index: int, size: int, staging: Staging | None) -> list[HostPiece]:
    """What process `index` of `size` writes, in an order that only the leaves decide.

    Args:
        staging: where the bytes are copied to; None to refer to memory of the arrays where that is possible.
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
    """True where numpy looks at the device's own memory."""
    return next(iter(array.devices())).platform == "cpu"


def packed(pieces: Sequence[HostPiece]) -> Iterator[list[HostPiece]]:
    """The pieces in groups of about `PACK_BYTES`, in order."""
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
