"""Files and folders of a checkpoint: their names, and reading and writing their bytes. Knows neither manifests nor arrays.

    root/step_00000100/manifest.json, data-00000-000000.bin      a committed step
    root/step_00000100.1/...                                     the same step saved again: the highest number is used
    root/.writing_step_00000200/...                              a save that is in progress or was interrupted

A step gets its name by one rename, after everything in it is on disk. Nothing under such a name is written again. Symbolic links
are never followed or taken for a step.

Note [Plain files]. Bytes go from an array's memory to the file through one block (`_direct`). Tensorstore's key-value store
copied them two or three times into fresh memory, so that a save of 1 GB took six times as long. With zarr arrays there were
one or two files for each shard of each tensor.
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

from spmd.base._errors import CheckpointError, called_at, message, shown
from spmd.checkpoint import _direct

_STEP = re.compile(r"step_(\d{8,18})(?:\.([1-9]\d{0,5}))?")
WRITING = ".writing_"
DELETING = ".deleting_"


class StepName(NamedTuple):
    """A step, and how many times it had been saved before. Restoring tries the greatest name first."""

    step: int
    attempt: int

    @property
    def folder(self) -> str:
        """Name of the step's folder."""
        return f"step_{self.step:08d}" + (f".{self.attempt}" if self.attempt else "")


def folder_of(path: object, taker: str, call: str) -> Path:
    """`path`, the path of a folder that the user passed.

    Args:
        path: text or a path; an empty text is none, though `os.path` takes it for the current folder.
        taker: name of the function, for the error.
        call: a call of it as code, for the error.

    Raises:
        CheckpointError: it is no path.
    """
    if not isinstance(path, str | os.PathLike) or path == "":
        raise CheckpointError(message(f"{taker} takes the path of a folder first, got {shown(path)}", *called_at(), fix=call))
    return Path(path)


def parse_name(name: str) -> StepName | None:
    """Parse a folder's name; None if it is not the name of a step."""
    match = _STEP.fullmatch(name)
    if match is None:
        return None
    found = StepName(int(match[1]), int(match[2] or 0))
    return found if found.folder == name else None  # 'step_000000001' is not the canonical name of step 1


def is_real_folder(path: Path) -> bool:
    """Whether `path` is a folder and not a symbolic link."""
    try:
        return stat.S_ISDIR(path.lstat().st_mode)
    except OSError:
        return False


def size_of(path: Path) -> int | None:
    """Bytes of a regular file; None if `path` is missing, a symbolic link or anything else."""
    try:
        found = path.lstat()
    except OSError:
        return None
    return found.st_size if stat.S_ISREG(found.st_mode) else None


def read_small(path: Path, max_bytes: int) -> bytes:
    """Read a whole file.

    Raises:
        CheckpointError: the file is missing, a link, a device, larger than `max_bytes`, or unreadable.
    """
    size = size_of(path)
    if size is None or size > max_bytes:
        what = "is missing or not a regular file" if size is None else f"has {size} bytes, but at most {max_bytes} are read"
        raise CheckpointError(message(f"{path} {what}", fix=f"restore another step: `spmd ckpt ls {path.parent.parent}` shows them"))
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(descriptor, "rb") as file:
            return file.read(max_bytes + 1)
    except OSError as error:
        raise failed(f"{path} cannot be read", error) from error


def write_small(path: Path, data: bytes) -> None:
    """Write a new file, and fsync it."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(path: Path) -> None:
    """Fsync a folder, so that new names and renames in it survive a power failure."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_folder(path: Path) -> None:
    """Create an empty folder. Anything of the same name (left by an interrupted save) is removed first."""
    remove(path)
    path.mkdir(parents=True)
    sync_folder(path.parent)


def commit(writing: Path, final: Path) -> None:
    """Rename a complete folder to its final name, atomically.

    Raises:
        FileExistsError: `final` exists.
    """
    sync_folder(writing)
    if final.exists() or final.is_symlink():  # an empty folder would be replaced by a rename
        raise FileExistsError(f"{final} exists")
    os.rename(writing, final)
    sync_folder(final.parent)


def remove(path: Path) -> None:
    """Delete a file, a link, or a folder with its contents. Does nothing if `path` does not exist, and follows no link."""
    try:
        is_folder = stat.S_ISDIR(path.lstat().st_mode)
    except FileNotFoundError:
        return
    if is_folder:
        shutil.rmtree(path)
    else:
        path.unlink()


def retire(folder: Path) -> None:
    """Delete a step. It is renamed first, so that an interrupted deletion does not leave half a step under its name."""
    hidden = folder.with_name(DELETING + folder.name)
    remove(hidden)
    os.rename(folder, hidden)
    sync_folder(folder.parent)
    shutil.rmtree(hidden)


class Store:
    """Reads and writes the data files of one folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def write(self, name: str, parts: Sequence[memoryview]) -> list[int]:
        """Write the parts, in order, to a new file; fsync it, read it back from disk and compare the checksums.

        Returns:
            The CRC-32 of each part.

        Raises:
            CheckpointError: the file cannot be written (disk full, read-only, gone), or reads back differently.
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
        """Fill `target` with a file's bytes from `offset` on, and return their CRC-32.

        Raises:
            CheckpointError: the file is missing, a link, too short, or unreadable.
        """
        return self._read(name, offset, (target[at : at + _direct.BLOCK] for at in range(0, len(target), _direct.BLOCK)))

    def checksum(self, name: str, offset: int, nbytes: int) -> int:
        """The CRC-32 of `nbytes` bytes of a file from `offset` on. Raises the errors of `read`."""
        block = memoryview(bytearray(min(nbytes, _direct.BLOCK)))
        return self._read(name, offset, (block[: min(_direct.BLOCK, nbytes - at)] for at in range(0, nbytes, _direct.BLOCK)))

    def _read(self, name: str, offset: int, targets: Iterator[memoryview]) -> int:
        crc32 = 0
        with self._opened(name) as descriptor:
            for target in targets:
                offset += _read_all(descriptor, target, offset)
                crc32 = zlib.crc32(target, crc32)  # now, while the block is in the processor's cache
        return crc32

    @contextmanager
    def _opened(self, name: str) -> Generator[int]:
        """Open a file for reading. An OSError, also in the body, becomes a CheckpointError."""
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
    """The CheckpointError for an error of the operating system."""
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
    "folder_of",
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
