"""`reshard`: rewrites a step with its arrays cut into the shards of another mesh. Runs on one host, without devices.

Restoring does not require it, since every process reads the parts it needs of any sharding. For a step that is restored often or
by many hosts it makes reading cheaper, since the pieces are then the shards that the processes read.
"""

from __future__ import annotations

import math
import os
import re
import zlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from spmd.base._errors import CheckpointError, called_at, message, shown
from spmd.checkpoint import _files, _inventory, _manifest
from spmd.checkpoint._boxes import Box, grid
from spmd.checkpoint._manifest import ArrayEntry, DataFile, Manifest, Piece
from spmd.checkpoint._read import Reader
from spmd.checkpoint._snapshot import PACK_BYTES
from spmd.checkpoint._tree import numpy_dtype

_MESH = re.compile(r"[^\s=,@]+=\d+(,[^\s=,@]+=\d+)*")
_CALL = 'spmd.checkpoint.reshard(source, target, "data=8")'


def reshard(source: str | os.PathLike[str], target: str | os.PathLike[str], mesh: str, *, step: int | None = None) -> Path:
    """Write a step of `source` under `target` with the shards of another mesh.

    Args:
        source: folder of the checkpoints.
        target: folder for the new step; it may not contain a step of the same number.
        mesh: axes and sizes, as in "data=4,model=2". Axes of an array's spec that are not among them do not split it.
        step: number of the step; by default the latest valid one.

    Returns:
        The new step's folder.

    Raises:
        CheckpointError: `mesh` is malformed, no step is valid, or the target exists or cannot be written.
    """
    sizes = _sizes(mesh)
    root, to = (_files.folder_of(path, "reshard", _CALL) for path in (source, target))
    name = _valid_step(root, step)
    manifest = _inventory.read_manifest(root, name)
    to = Path(os.path.abspath(to))
    final = to / _files.StepName(manifest.step, 0).folder
    writing = to / (_files.WRITING + final.name)
    try:
        to.mkdir(parents=True, exist_ok=True)
        if final.exists():
            raise CheckpointError(message(f"{final} exists", "nothing is overwritten", fix="choose another target"))
        _files.make_folder(writing)
        new = _rewritten(manifest, _files.Store(root / name.folder), _files.Store(writing), sizes)
        _files.write_small(writing / _manifest.NAME, new.to_bytes())
        _manifest.parse(_files.read_small(writing / _manifest.NAME, _inventory.MAX_MANIFEST_BYTES))
        _files.commit(writing, final)
    except OSError as error:
        raise _files.failed(f"{final} cannot be written", error) from error
    return final


def _valid_step(root: Path, step: int | None) -> _files.StepName:
    names = _inventory.candidates(root, step)
    problems: list[str] = []
    for name in names:
        verdict = _inventory.verify_folder(root, name)
        if not verdict.problems:
            return name
        problems.append(f"{name.folder}: {verdict.problems[0]}")
    raise CheckpointError(message(f"{root} has no valid step", *problems, fix="check the disk"))


def _sizes(mesh: object) -> dict[str, int]:
    if not isinstance(mesh, str):
        what = f"mesh of reshard must be a text of axes and sizes, got {shown(mesh)}"
        raise CheckpointError(message(what, *called_at(), fix=_CALL))
    if not _MESH.fullmatch(mesh):
        raise CheckpointError(message(f"mesh={mesh!r} is malformed", fix='write axes and sizes, as in "data=4,model=2"'))
    sizes = {axis: int(size) for axis, size in (part.split("=") for part in mesh.split(","))}
    if 0 in sizes.values():
        raise CheckpointError(message(f"mesh={mesh!r} has an axis of size 0", fix="write sizes of 1 or more"))
    return sizes


def _rewritten(manifest: Manifest, source: _files.Store, target: _files.Store, sizes: Mapping[str, int]) -> Manifest:
    """Rewrite one array after the other: read, check, cut and write it. Returns the new manifest."""
    pack = _Pack(target)
    arrays: list[ArrayEntry] = []
    for number, entry in enumerate(manifest.arrays):
        boxes = _boxes(entry, sizes)
        reader = Reader(manifest, source)
        values = reader.whole(number)
        limit = max(1, PACK_BYTES // numpy_dtype(entry.dtype).itemsize)
        pieces = [pack.add(piece, values) for box in boxes for piece in box.pieces(limit)]
        arrays.append(replace(entry, pieces=tuple(pieces)))
    pack.flush()
    about = {**manifest.about, "resharded": ",".join(f"{axis}={size}" for axis, size in sizes.items())}
    return replace(manifest, files=tuple(pack.files), arrays=tuple(arrays), about=about)


def _boxes(entry: ArrayEntry, sizes: Mapping[str, int]) -> list[Box]:
    parts = [math.prod(sizes.get(axis, 1) for axis in axes) for axes in entry.spec or ((),) * len(entry.shape)]
    return grid(entry.shape, parts)


class _Pack:
    """Packs pieces into files of at most `PACK_BYTES`."""

    def __init__(self, store: _files.Store) -> None:
        self.files: list[DataFile] = []
        self._store, self._waiting, self._size = store, list[bytes](), 0

    def add(self, box: Box, values: np.ndarray[Any, Any]) -> Piece:
        """Add one box of an array, and return its piece for the manifest."""
        data = np.ascontiguousarray(values[tuple(slice(a, b) for a, b in zip(box.start, box.stop, strict=True))]).tobytes()
        if self._waiting and self._size + len(data) > PACK_BYTES:
            self.flush()
        piece = Piece(box, len(self.files), self._size, len(data), zlib.crc32(data))
        self._waiting.append(data)
        self._size += len(data)
        return piece

    def flush(self) -> None:
        """Write the waiting pieces to a file."""
        if not self._waiting:
            return
        file = DataFile(f"data-00000-{len(self.files):06d}.bin", self._size)
        self._store.write(file.name, [memoryview(data) for data in self._waiting])
        self.files.append(file)
        self._waiting, self._size = [], 0


__all__ = ["reshard"]
