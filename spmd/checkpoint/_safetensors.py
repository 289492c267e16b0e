"""The safetensors format: the header's length in eight bytes, a JSON header, then the bytes of the tensors without gaps.

    file = SafetensorsFile(path)
    file.entries["lm_head.weight"].shape
    file.read("lm_head.weight", box)       # reads only the bytes of that box

A file is validated when it is opened. Names in a header are keys and never paths. A file whose numbers contradict each other or
the file's size is refused, and so is anything that is not a regular file.

The safetensors package is the reference in the tests. It is not used here because it writes a whole file from one process's
memory, whereas in `save_safetensors` every process writes its own shards. Reading needs the same knowledge of the format.
"""

from __future__ import annotations

import json
import math
import os
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from spmd.base._errors import CheckpointError, message
from spmd.checkpoint._boxes import Box
from spmd.checkpoint._tree import numpy_dtype

MAX_HEADER_BYTES = 100_000_000  # the format's own limit
_DTYPES = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "U16": "uint16",
    "I16": "int16",
    "U32": "uint32",
    "I32": "int32",
    "U64": "uint64",
    "I64": "int64",
    "F16": "float16",
    "BF16": "bfloat16",
    "F32": "float32",
    "F64": "float64",
    "C64": "complex64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
}
NAMES = {ours: theirs for theirs, ours in _DTYPES.items()}
_FILE_SUFFIX = ".safetensors"
_INDEX_SUFFIX = ".safetensors.index.json"
_MAX_INDEX_BYTES = 100_000_000


class Entry(NamedTuple):
    """A tensor of a file: torch's name of its dtype, its shape, and the offset of its first byte in the file."""

    dtype: str
    shape: tuple[int, ...]
    offset: int

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return math.prod(self.shape) * numpy_dtype(self.dtype).itemsize


class SafetensorsFile:
    """An open file. `close` closes it.

    Attributes:
        path: path of the file.
        entries: the file's tensors, by name.
        bytes_read: bytes of tensors read so far.

    Raises:
        CheckpointError: the file cannot be opened, or is not valid safetensors.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.bytes_read = 0
        try:
            self._descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except (OSError, ValueError) as error:
            raise _bad(path, f"it cannot be opened: {error}") from error
        try:
            self.entries = self._parsed()
        except CheckpointError:
            self.close()
            raise

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)

    def _parsed(self) -> dict[str, Entry]:
        """Read and check the header."""
        found = os.fstat(self._descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise _bad(self.path, "it is not a regular file")
        length = int.from_bytes(os.pread(self._descriptor, 8, 0), "little")
        if found.st_size < 8 or length > min(MAX_HEADER_BYTES, found.st_size - 8):
            raise _bad(self.path, f"its header has {length} bytes, but the whole file has {found.st_size}")
        header = load_json(os.pread(self._descriptor, length, 8), self.path)
        try:
            entries = {name: _entry(row, 8 + length) for name, row in header.items() if name != "__metadata__"}
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            if isinstance(error, CheckpointError):
                raise _bad(self.path, str(error).splitlines()[0]) from error
            raise _bad(self.path, f"an entry of its header is malformed: {type(error).__name__}") from error
        end = 8 + length
        for entry in sorted(entries.values(), key=lambda entry: (entry.offset, entry.nbytes)):
            if entry.offset != end:
                raise _bad(self.path, "there are gaps or overlaps between its tensors")
            end += entry.nbytes
        if end != found.st_size:
            raise _bad(self.path, f"its tensors end at byte {end}, but the file ends at byte {found.st_size}")
        return entries

    def read(self, name: str, box: Box) -> np.ndarray[Any, Any]:
        """Read one box of a tensor, as a row-major array. Reads only the bytes of the box.

        Raises:
            CheckpointError: the file is unreadable, or became shorter.
        """
        entry = self.entries[name]
        dtype = numpy_dtype(entry.dtype)
        out = np.empty(box.shape, dtype)
        octets = memoryview(out.reshape(-1).view(np.uint8).data)
        at = 0
        for start, nbytes in runs(entry.shape, box, dtype.itemsize):
            self._fill(octets[at : at + nbytes], entry.offset + start)
            at += nbytes
        self.bytes_read += at
        return out

    def _fill(self, target: memoryview, offset: int) -> None:
        while target:
            try:
                count = os.preadv(self._descriptor, [target], offset)
            except OSError as error:
                raise _bad(self.path, f"it cannot be read: {error}") from error
            if not count:
                raise _bad(self.path, "it was truncated while it was read")
            target, offset = target[count:], offset + count


def runs(shape: tuple[int, ...], box: Box, itemsize: int) -> Iterator[tuple[int, int]]:
    """The contiguous runs of bytes of a box in a row-major array of this shape, as (offset, bytes), in order."""
    if not box.size:
        return
    inner = len(shape)
    while inner and box.shape[inner - 1] == shape[inner - 1]:
        inner -= 1
    run = math.prod(shape[inner:]) * itemsize * (box.shape[inner - 1] if inner else 1)
    strides = [math.prod(shape[dim + 1 :]) * itemsize for dim in range(len(shape))]
    base = sum(start * stride for start, stride in zip(box.start, strides, strict=True))
    outer = box.shape[: inner - 1] if inner else ()
    for index in np.ndindex(*outer):
        yield base + sum(i * stride for i, stride in zip(index, strides, strict=False)), run


def _entry(row: Any, base: int) -> Entry:
    shape = tuple(row["shape"])
    begin, end = row["data_offsets"]
    numbers = (*shape, begin, end)
    if any(type(number) is not int or not 0 <= number < 2**63 for number in numbers) or len(shape) > 64:
        raise ValueError("a size or offset is not a non-negative integer of 63 bits, or there are more than 64 dims")
    entry = Entry(_DTYPES[row["dtype"]], shape, base + begin)
    if end - begin != entry.nbytes:
        raise ValueError("the bytes of a tensor do not match its shape and dtype")
    return entry


def load_json(data: bytes, path: Path) -> dict[str, Any]:
    """Parse a JSON object without repeated keys.

    Raises:
        CheckpointError: `data` is not such an object, or is nested too deeply.
    """
    try:
        found = json.loads(data.decode("utf-8"), object_pairs_hook=_distinct)
    except (ValueError, RecursionError) as error:
        raise _bad(path, f"its JSON is invalid: {str(error)[:80]}") from error
    if not isinstance(found, dict):
        raise _bad(path, "its JSON is not an object")
    return found


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name is repeated")
    return found


def files_of(path: Path) -> Mapping[str, Path] | list[Path]:
    """The files of a model: a list with the only file, or with an index the file of each tensor by name.

    Args:
        path: a file, an index, or a folder that contains one file or one index.

    Raises:
        CheckpointError: a folder contains no model or several, or the index is invalid or names a file outside of its folder.
    """
    if path.is_dir():
        indices = sorted(path.glob("*" + _INDEX_SUFFIX))
        if len(indices) == 1:
            return _indexed(indices[0])
        files = sorted(path.glob("*" + _FILE_SUFFIX))
        if len(indices) > 1 or len(files) != 1:
            what = f"it contains {len(indices)} files *{_INDEX_SUFFIX} and {len(files)} files *{_FILE_SUFFIX}"
            raise CheckpointError(message(f"{path} does not contain exactly one model", what, fix="pass the file or the index to read"))
        return files
    return _indexed(path) if path.name.endswith(".json") else [path]


def _indexed(path: Path) -> dict[str, Path]:
    """Read an index: the file of each tensor, by name."""
    try:
        if not path.is_file() or path.stat().st_size > _MAX_INDEX_BYTES:
            raise _bad(path, f"the index is not a regular file, or has more than {_MAX_INDEX_BYTES} bytes")
        index = load_json(path.read_bytes(), path)
    except OSError as error:
        raise _bad(path, f"the index cannot be read: {error}") from error
    files = index.get("weight_map")
    if not isinstance(files, dict):
        raise _bad(path, "the index has no weight_map")
    for name in files.values():
        if not isinstance(name, str) or name != Path(name).name or "\\" in name or "\0" in name or not name.endswith(_FILE_SUFFIX):
            raise _bad(path, f"the index names {str(name)[:80]!r}, which is not a *{_FILE_SUFFIX} file in the same folder")
    return {tensor: path.with_name(name) for tensor, name in files.items()}


def _bad(path: Path, what: str) -> CheckpointError:
    return CheckpointError(message(f"{path} is not a valid safetensors file", what, fix="download it or write it again"))


__all__ = ["MAX_HEADER_BYTES", "NAMES", "Entry", "SafetensorsFile", "files_of", "load_json", "runs"]
