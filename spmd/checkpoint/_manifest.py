"""The manifest of one step: its arrays, and for each piece of an array the location of its bytes and their checksum.

The first line contains the SHA-256 and the length of the JSON after it, so that a change of any byte is detected. The CRC-32 of
a piece is computed from memory, before the bytes are written.

    manifest = parse((folder / "manifest.json").read_bytes())
    manifest.arrays[0].pieces[0].crc32

A manifest is untrusted input. Names are never used as paths, numbers are checked against each other, and the bytes of all arrays
together are exactly those of the files. This module does not access the file system.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from spmd.base._errors import CheckpointError
from spmd.checkpoint._boxes import Box, tile
from spmd.checkpoint._tree import Node, integer, malformed, numpy_dtype

NAME = "manifest.json"
VERSION = 1
_FIRST_LINE = re.compile(rb"spmd-checkpoint (\d{1,4}) sha256 ([0-9a-f]{64}) (\d{1,15})\n")
_FILE = re.compile(r"data-\d{5}-\d{6}\.bin")
_MAX_RANK = 64
MAX_NAME = 4096


@dataclass(frozen=True, slots=True)
class Piece:
    """Row-major bytes of one box of an array: `nbytes` bytes from `offset` in file number `file` of the manifest."""

    box: Box
    file: int
    offset: int
    nbytes: int
    crc32: int


@dataclass(frozen=True, slots=True)
class DataFile:
    """A file that consists of pieces without gaps."""

    name: str
    nbytes: int


@dataclass(frozen=True)
class ArrayEntry:
    """One array.

    Attributes:
        name: path in the state, for people and error messages.
        dtype: torch's name of the dtype, e.g. 'bfloat16'.
        spec: for each dim, the mesh axes that split it when it was saved; None if the array was not on a mesh.
        pieces: together they cover every element exactly once.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    spec: tuple[tuple[str, ...], ...] | None = None
    pieces: tuple[Piece, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of the whole array."""
        return math.prod(self.shape) * numpy_dtype(self.dtype).itemsize


@dataclass(frozen=True)
class Manifest:
    """One step.

    Attributes:
        files: the data files; a piece refers to one by its number.
        arrays: the arrays; a node of `tree` refers to one by its number.
        tree: the state as plain data, with arrays as numbers (see `_tree`).
        local: for each process, the nodes that differ between processes (random state of the host, position of a loader), by path.
        about: versions, number of processes and time of the save; for people only.
    """

    step: int
    files: tuple[DataFile, ...]
    arrays: tuple[ArrayEntry, ...]
    tree: Node
    local: tuple[Mapping[str, Node], ...] = ()
    about: Mapping[str, Any] = field(default_factory=dict[str, Any])

    @property
    def nbytes(self) -> int:
        """Bytes of all data files."""
        return sum(file.nbytes for file in self.files)

    def to_bytes(self) -> bytes:
        """The contents of `manifest.json`."""
        body = json.dumps(self.to_json(), separators=(",", ":"), ensure_ascii=True).encode("ascii")
        return b"spmd-checkpoint %d sha256 %s %d\n" % (VERSION, hashlib.sha256(body).hexdigest().encode(), len(body)) + body

    def to_json(self) -> dict[str, Any]:
        """The manifest as nested lists and dicts."""
        return {
            "step": self.step,
            "files": [[file.name, file.nbytes] for file in self.files],
            "arrays": [array_to_json(entry) for entry in self.arrays],
            "tree": self.tree,
            "local": [dict(one) for one in self.local],
            "about": dict(self.about),
        }


def array_to_json(entry: ArrayEntry) -> dict[str, Any]:
    """One array as nested lists and dicts."""
    pieces = [[p.file, p.offset, p.nbytes, p.crc32, list(p.box.start), list(p.box.stop)] for p in entry.pieces]
    spec = None if entry.spec is None else [list(axes) for axes in entry.spec]
    return {"name": entry.name, "dtype": entry.dtype, "shape": list(entry.shape), "spec": spec, "pieces": pieces}


def parse(data: bytes) -> Manifest:
    """Parse and check the contents of `manifest.json`.

    Raises:
        CheckpointError: the checksum does not match, the format version is not supported, or the numbers contradict each other.
    """
    first = _FIRST_LINE.match(data[:200])
    if first is None:
        raise malformed("its first line is not 'spmd-checkpoint <version> sha256 <digest> <length>'")
    body = memoryview(data)[first.end() :]
    if len(body) != int(first[3]):
        raise malformed(f"{len(body)} bytes follow the first line, but {int(first[3])} were written")
    if (found := hashlib.sha256(body).hexdigest().encode()) != first[2]:
        raise malformed(f"its SHA-256 is {found.decode()[:16]}..., but its first line says {first[2].decode()[:16]}...")
    if int(first[1]) != VERSION:
        raise malformed(f"its format version is {int(first[1])}, but this package reads version {VERSION}")
    return from_json(load_json(bytes(body)))


def load_json(data: bytes) -> Any:
    """Parse JSON without repeated keys.

    Raises:
        CheckpointError: `data` is not such JSON, or is nested too deeply.
    """
    try:
        return json.loads(data, object_pairs_hook=_distinct)
    except (ValueError, RecursionError) as error:
        raise malformed(f"it is not valid JSON: {str(error)[:80]}") from error


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key is repeated")
    return found


def from_json(data: Any) -> Manifest:
    """The inverse of `Manifest.to_json`.

    Raises:
        CheckpointError: an entry is missing, has the wrong type, or contradicts another entry.
    """
    try:
        files = tuple(_file(*row) for row in data["files"])
        arrays = tuple(array_from_json(row, len(files)) for row in data["arrays"])
        local = tuple(_mapping(one) for one in data["local"])
        manifest = Manifest(integer(data["step"]), files, arrays, data["tree"], local, _mapping(data["about"]))
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise malformed(f"{type(error).__name__}: {str(error)[:80]}") from error
    if len({file.name for file in files}) != len(files):
        raise malformed("a data file is listed twice")
    _require_bytes_used_once(manifest)
    for entry in arrays:
        if not _is_covered(entry):
            raise malformed(f"the pieces of {entry.name[:80]!r} do not cover it exactly once")
    return manifest


def _is_covered(entry: ArrayEntry) -> bool:
    try:
        return tile([piece.box for piece in entry.pieces], entry.shape)
    except RecursionError:  # nested more deeply than the boxes of any sharding
        return False


def _mapping(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise malformed("an entry is not a JSON object")
    return value


def _file(name: Any, nbytes: Any) -> DataFile:
    if not isinstance(name, str) or not _FILE.fullmatch(name):
        raise malformed(f"{str(name)[:80]!r} is not the name of a data file")
    return DataFile(name, integer(nbytes))


def array_from_json(row: Any, num_files: int) -> ArrayEntry:
    """The inverse of `array_to_json`. Checks pieces against the array's shape and dtype and against the number of files.

    Raises:
        CheckpointError: the row is malformed.
    """
    name, shape = row["name"], tuple(map(integer, row["shape"]))
    if not isinstance(name, str) or len(name) > MAX_NAME or len(shape) > _MAX_RANK:
        raise malformed("an array has no valid name, or too many dims")
    itemsize = numpy_dtype(row["dtype"]).itemsize
    pieces = tuple(_piece(piece, shape, itemsize, num_files) for piece in row["pieces"])
    return ArrayEntry(name, row["dtype"], shape, _spec(row["spec"], len(shape)), pieces)


def _piece(row: Any, shape: tuple[int, ...], itemsize: int, num_files: int) -> Piece:
    file, offset, nbytes, crc32, start, stop = row
    box = Box(tuple(map(integer, start)), tuple(map(integer, stop)))
    piece = Piece(box, integer(file), integer(offset), integer(nbytes), integer(crc32))
    fits = len(box.start) == len(box.stop) == len(shape) and all(a < b <= n for a, b, n in zip(box.start, box.stop, shape, strict=True))
    if not fits or piece.file >= num_files or piece.nbytes != box.size * itemsize or crc32 >= 2**32:
        raise malformed("a piece does not fit its array")
    return piece


def _spec(value: Any, rank: int) -> tuple[tuple[str, ...], ...] | None:
    if value is None:
        return None
    spec = tuple(tuple(str(axis) for axis in axes) for axes in value)
    if len(spec) != rank:
        raise malformed(f"a spec has {len(spec)} entries for {rank} dims")
    return spec


def _require_bytes_used_once(manifest: Manifest) -> None:
    """Check that every byte of every file belongs to exactly one piece: none is without a checksum, none is used by two arrays."""
    spans: list[list[tuple[int, int]]] = [[] for _ in manifest.files]
    for entry in manifest.arrays:
        for piece in entry.pieces:
            spans[piece.file].append((piece.offset, piece.nbytes))
    for file, used in zip(manifest.files, spans, strict=True):
        if not _are_contiguous(used, file.nbytes):
            raise malformed(f"the pieces in {file.name} do not fill it exactly once")


def _are_contiguous(spans: Sequence[tuple[int, int]], end: int) -> bool:
    """Whether spans (offset, bytes) cover 0 to `end` without gaps or overlaps."""
    at = 0
    for offset, nbytes in sorted(spans):
        if offset != at:
            return False
        at += nbytes
    return at == end


__all__ = ["MAX_NAME", "NAME", "ArrayEntry", "DataFile", "Manifest", "Piece", "array_from_json", "array_to_json", "load_json", "parse"]
