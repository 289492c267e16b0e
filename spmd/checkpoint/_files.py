"""Files of a checkpoint: how bytes reach a disk and come back, and which names under a root mean what.

    root/step_00000100/manifest.json, data-00000-000000.bin      a committed step
    root/step_00000100.1/...                                     the same step saved again: the higher number counts
    root/.writing_step_00000200/...                              a save in progress, or what was left of one

A step appears under its name by one rename, when everything in it is on disk; nothing under such a name is written again.
A folder or file that is a symbolic link is not one of ours. This module knows no manifest and no array.

Note [Plain files]. Bytes go from an array's memory to the file by way of one block (`_direct`). Through tensorstore's key-value store
they were copied two or three times into fresh memory, which made a save of 1 GB six times as long; as zarr arrays there was
a file, or two, for each shard of each tensor.
"""

from __future__ import annotations

import os
import re
import shutil
import stat
import zlib
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from spmd.base._errors import CheckpointError, message
from spmd.checkpoint import _direct

_STEP = re.compile(r"step_(\d{8,18})(?:\.([1-9]\d{0,5}))?")
WRITING = ".writing_"
DELETING = ".deleting_"


class StepName(NamedTuple):
    """A step and how often it had been saved before; ordered as they are to be tried, last first."""

    step: int
    attempt: int

    @property
    def folder(self) -> str:
        """The folder's name."""
        return f"step_{self.step:08d}" + (f".{self.attempt}" if self.attempt else "")


def parse_name(name: str) -> StepName | None:
    """The step of a folder's name, or None if no step has this name."""
    match = _STEP.fullmatch(name)
    if match is None:
        return None
    found = StepName(int(match[1]), int(match[2] or 0))
    return found if found.folder == name else None  # 'step_000000001' is not how step 1 is written


def is_real_folder(path: Path) -> bool:
    """True for a folder that is no symbolic link."""
    try:
        return stat.S_ISDIR(path.lstat().st_mode)
    except OSError:
        return False


def size_of(path: Path) -> int | None:
    """Bytes of a regular file that is no symbolic link; None if it is anything else, or nothing."""
    try:
        found = path.lstat()
    except OSError:
        return None
    return found.st_size if stat.S_ISREG(found.st_mode) else None


def read_small(path: Path, max_bytes: int) -> bytes:
    """A whole file; CheckpointError if it is missing, a link, a device, larger than `max_bytes`, or cannot be read."""
    size = size_of(path)
    if size is None or size > max_bytes:
        what = "is missing or not a regular file" if size is None else f"has {size} bytes, at most {max_bytes} are read"
        raise CheckpointError(message(f"{path} {what}", fix=f"restore another step: `spmd ckpt ls {path.parent.parent}` shows them"))
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(descriptor, "rb") as file:
            return file.read(max_bytes + 1)
    except OSError as error:
        raise failed(f"{path} cannot be read", error) from error


def write_small(path: Path, data: bytes) -> None:
    """A whole new file, synced."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(path: Path) -> None:
    """Make names and renames in a folder survive a loss of power."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_folder(path: Path) -> None:
    """A new empty folder; what had the name before (a save that was interrupted) is removed."""
    remove(path)
    path.mkdir(parents=True)
    sync_folder(path.parent)


def commit(writing: Path, final: Path) -> None:
    """Give a complete folder its name, in one step, never over another."""
    sync_folder(writing)
    if final.exists() or final.is_symlink():  # an empty folder would be replaced by a rename
        raise FileExistsError(f"{final} exists")
    os.rename(writing, final)
    sync_folder(final.parent)


def remove(path: Path) -> None:
    """Delete a file, a link or a folder with all that is in it; nothing happens if it is not there. Follows no link."""
    try:
        is_folder = stat.S_ISDIR(path.lstat().st_mode)
    except FileNotFoundError:
        return
    if is_folder:
        shutil.rmtree(path)
    else:
        path.unlink()


def retire(folder: Path) -> None:
    """Delete a step: first its name, so that an interrupted deletion leaves no half of a step behind."""
    hidden = folder.with_name(DELETING + folder.name)
    remove(hidden)
    os.rename(folder, hidden)
    sync_folder(folder.parent)
    shutil.rmtree(hidden)


class Store:
    """The data files of one folder, by name."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def write(self, name: str, parts: Sequence[memoryview]) -> list[int]:
        """A new file of these bytes, one after the other; on disk, and read back from there, when this returns.

        Returns:
            The CRC-32 of each part.

        Raises:
            CheckpointError: the disk is full, read-only, gone, ..., or does not give back what was written.
        """
        try:
            descriptor = os.open(self._folder / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
            try:
                checksums = _direct.write(descriptor, parts)
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        except OSError as error:
            raise failed(f"{self._folder / name} cannot be written", error) from error
        with self._opened(name) as descriptor:
            if _direct.read_checksums(descriptor, [len(part) for part in parts]) != checksums:
                raise CheckpointError(message(f"{name} reads back differently from what was written", fix="check the disk"))
        return checksums

    def read(self, name: str, offset: int, target: memoryview) -> int:
        """Fill `target` with a file's bytes from `offset`; their CRC-32.

        Raises:
            CheckpointError: the file is missing, a link, too short, or cannot be read.
        """
        return self._read(name, offset, (target[at : at + _direct.BLOCK] for at in range(0, len(target), _direct.BLOCK)))

    def checksum(self, name: str, offset: int, nbytes: int) -> int:
        """The CRC-32 of a part of a file; errors as of `read`."""
        block = memoryview(bytearray(min(nbytes, _direct.BLOCK)))
        return self._read(name, offset, (block[: min(_direct.BLOCK, nbytes - at)] for at in range(0, nbytes, _direct.BLOCK)))

    def _read(self, name: str, offset: int, targets: Iterator[memoryview]) -> int:
        crc32 = 0
        with self._opened(name) as descriptor:
            for target in targets:
                offset += _read_all(descriptor, target, offset)
                crc32 = zlib.crc32(target, crc32)  # while the block is in the processor's cache
        return crc32

    @contextmanager
    def _opened(self, name: str) -> Generator[int]:
        """A file to read from; what the system refuses meanwhile is a CheckpointError."""
        try:
            descriptor = os.open(self._folder / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                yield descriptor
            finally:
                os.close(descriptor)
        except OSError as error:
            raise failed(f"{self._folder / name} cannot be read", error) from error


def _read_all(descriptor: int, target: memoryview, offset: int) -> int:
    at = 0
    while at < len(target):
        count = os.preadv(descriptor, [target[at:]], offset + at)
        if not count:
            raise OSError(f"it ends at byte {offset + at}")
        at += count
    return at


def failed(what: str, error: Exception) -> CheckpointError:
    """The error for something that the system refused."""
    return CheckpointError(
        message(what, " ".join(str(error).split())[:300], fix="free space or repair the disk, then save or restore again")
    )


__all__ = [
    "DELETING",
    "WRITING",
    "StepName",
    "Store",
    "commit",
    "failed",
    "is_real_folder",
    "make_folder",
    "parse_name",
    "read_small",
    "remove",
    "retire",
    "size_of",
    "sync_folder",
    "write_small",
]
