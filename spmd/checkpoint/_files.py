"""Files of a checkpoint: how bytes reach a disk and come back, and which names under a root mean what.

    root/step_00000100/manifest.json, data-00000-000000.bin      a committed step
    root/step_00000100.1/...                                     the same step saved again: the higher number counts
    root/.writing_step_00000200/...                              a save in progress, or what was left of one

A step appears under its name by one rename, when everything in it is on disk; nothing under such a name is written again.
Data go through tensorstore's key-value store (atomic writes, synced, off Python's lock). A folder or file that is a symbolic
link is not one of ours. This module knows no manifest and no array.
"""

from __future__ import annotations

import os
import re
import shutil
import stat
from pathlib import Path
from typing import Any, NamedTuple

import tensorstore as ts

from spmd._errors import CheckpointError, message

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
        what = "is missing, or no regular file" if size is None else f"has {size} bytes, at most {max_bytes} are read"
        raise CheckpointError(message(f"{path} {what}", fix="restore another step: `spmd ckpt ls` shows them"))
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
        spec = {"driver": "file", "path": f"{folder.resolve()}/", "context": {"file_io_sync": True}}
        try:
            self._values: Any = ts.KvStore.open(spec).result()
        except (ValueError, OSError, RuntimeError) as error:
            raise failed(f"{folder} cannot be used", error) from error

    def write(self, name: str, data: bytes) -> None:
        """A new file, on disk when this returns.

        Raises:
            CheckpointError: the disk is full, read-only, gone, ...
        """
        try:
            self._values.write(name, data).result()
        except (ValueError, OSError, RuntimeError) as error:
            raise failed(f"{self._folder / name} cannot be written", error) from error

    def read(self, name: str, offset: int, nbytes: int) -> bytes:
        """`nbytes` of a file from `offset`.

        Raises:
            CheckpointError: the file is missing, a link, too short, or cannot be read.
        """
        size = size_of(self._folder / name)
        if size is None or size < offset + nbytes:
            what = "is missing, or no regular file" if size is None else f"has {size} bytes, {offset + nbytes} or more were written"
            raise CheckpointError(message(f"{self._folder / name} {what}", fix="restore another step: `spmd ckpt ls` shows them"))
        if not nbytes:
            return b""
        try:
            found = self._values.read(name, byte_range=slice(offset, offset + nbytes)).result()
        except (ValueError, OSError, RuntimeError) as error:
            raise failed(f"{self._folder / name} cannot be read", error) from error
        return found.value


def failed(what: str, error: Exception) -> CheckpointError:
    """The error for something that the system refused."""
    return CheckpointError(message(what, " ".join(str(error).split())[:300], fix="free space or mend the disk, then save or restore again"))


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
