"""Compiled programs as files, for the processes that come after.

Note [Cached executables]
The files in the folder are executed. So the folder belongs to one user, nobody else may write there, and one that is open to others
is not used. The name of a file is jax's key (program, options, versions, devices), in a folder per machine: a program for a CPU uses
the instructions of this CPU. A file contains its checksum, is written under another name first, and is removed if it is broken.
Where all files together are too large, the least recently read are removed. None of this ever fails a compilation.
"""

from __future__ import annotations

import hashlib
import logging
import os
import platform
import stat
import tempfile
import threading
from collections.abc import Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import jax
from jax.experimental.compilation_cache import compilation_cache

from spmd.base._errors import SpmdError, message
from spmd.base._jax import CacheInterface
from spmd.patches._table import current, replace

WORTH_KEEPING_S = 0.1  # seconds of compilation: below, reading a file is no quicker
_MAGIC = b"spmd program 1\n"
_ENDING = ".program"
_MACHINE = "machine-"
_OPENED = "jax._src.compilation_cache.get_file_cache"
_folders: dict[str, ProgramFiles] = {}
_here = threading.local()
_log = logging.getLogger("spmd.compile")


def default_folder() -> Path:
    """Where the programs of this user lie: `spmd` in the user's cache directory."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "spmd"


class ProgramFiles(CacheInterface):
    """The programs of a folder, as jax asks for them. See Note [Cached executables].

    Args:
        folder: is made where it is missing, with mode 0700.
        max_bytes: of all files together.

    Raises:
        SpmdError: it cannot be made, or others can write there.
    """

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self.folder, self.max_bytes = folder, max_bytes
        self._path = folder / machine_name()
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            for own in (folder, self._path):
                own.mkdir(mode=0o700, exist_ok=True)
                _require_own(own)
            with tempfile.TemporaryFile(dir=self._path):
                pass
        except OSError as error:
            raise SpmdError(
                message(f"cache_dir={str(folder)!r} is not a writable folder", str(error), fix='spmd.configure(cache_dir="~/.cache/spmd")')
            ) from error

    def get(self, key: str) -> Any:
        """The bytes kept under a key; None if there are none, or not as they were written."""
        file = self._path / (key + _ENDING)
        try:
            written = file.read_bytes()
        except OSError:
            return None
        start = len(_MAGIC) + hashlib.sha256().digest_size
        value = written[start:]
        if written[:start] != _MAGIC + hashlib.sha256(value).digest():
            _log.warning("the cached program %s is damaged and is compiled again", file)
            with suppress(OSError):
                file.unlink()
            return None
        with suppress(OSError):
            os.utime(file)
        return value

    def has(self, key: str) -> bool:
        """Whether something is kept under a key."""
        return (self._path / (key + _ENDING)).exists()

    def put(self, key: str, value: bytes) -> None:
        """Keep bytes under a key, whole or not at all."""
        try:
            handle, name = tempfile.mkstemp(dir=self._path)
            try:
                with os.fdopen(handle, "wb") as file:
                    file.write(_MAGIC + hashlib.sha256(value).digest())
                    file.write(value)
                os.replace(name, self._path / (key + _ENDING))
            except BaseException:
                os.unlink(name)
                raise
        except OSError as error:
            _log.warning("a compiled program could not be cached: %s", error)
        self._drop_oldest()

    def _drop_oldest(self) -> None:
        """Remove what nobody read for longest until the rest is small enough, and what a killed process left half written."""
        found: list[tuple[float, int, Path]] = []
        for path in self.folder.glob(f"{_MACHINE}*/*"):
            with suppress(OSError):  # another process removed it
                seen = path.stat()
                found.append((seen.st_mtime, seen.st_size, path))
        total = sum(size for _, size, _ in found)
        for _, size, path in sorted(found):
            if total <= self.max_bytes:
                return
            with suppress(OSError):
                path.unlink()
            total -= size


def _require_own(folder: Path) -> None:
    """Raise SpmdError if somebody else can write to a folder."""
    if not hasattr(os, "geteuid"):
        return
    seen = folder.stat()
    if seen.st_uid != os.geteuid() or seen.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise SpmdError(
            message(
                f"cache_dir={str(folder)!r} is writable by other users, and its files are executed",
                f"mode {stat.S_IMODE(seen.st_mode):04o}, owner {seen.st_uid}, this process {os.geteuid()}",
                fix=f"chmod 700 {folder}; or spmd.configure(cache_dir=<a private folder>)",
            )
        )


@lru_cache(maxsize=1)
def machine_name() -> str:
    """A name for machines with this CPU's instructions."""
    facts = [platform.machine(), platform.system()]
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        facts += sorted({line for line in lines if line.startswith(("flags", "Features", "model name"))})
    return _MACHINE + hashlib.sha256("\n".join(facts).encode()).hexdigest()[:16]


def keep_programs(folder: Path, max_bytes: int) -> None:
    """Have jax write what it compiles from now on to a folder, and look for it there."""
    _folders[str(folder)] = ProgramFiles(folder, max_bytes)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", WORTH_KEEPING_S)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    _use(str(folder))


def keep_no_programs() -> None:
    """Have jax compile what this process has not compiled."""
    _use(None)


def files_in_use() -> ProgramFiles | None:
    """The folder of ours that jax asks now, if it asks one."""
    folder = jax.config.values["jax_compilation_cache_dir"]
    return _folders.get(folder) if jax.config.values["jax_enable_compilation_cache"] else None


@dataclass
class CacheRequest:
    """What jax asked its folder for: the last key, and what it got."""

    key: str | None = None
    value: bytes | None = None


@contextmanager
def cache_requests() -> Generator[CacheRequest]:
    """What jax asks for on this thread while active."""
    before, _here.request = getattr(_here, "request", None), CacheRequest()
    try:
        yield _here.request
    finally:
        _here.request = before


class _NotedCache(CacheInterface):
    """A folder that says what it was asked for."""

    def __init__(self, files: Any) -> None:
        self._files, self._path = files, files._path

    def get(self, key: str) -> Any:
        value = self._files.get(key)
        request = getattr(_here, "request", None)
        if request is not None:
            request.key, request.value = key, value
        return value

    def put(self, key: str, value: bytes) -> None:
        self._files.put(key, value)


@contextmanager
def programs_not_kept() -> Generator[None]:
    """While active, jax keeps no compiled programs: it cannot read those for chips that are not here, and warns of each."""
    folder = jax.config.values["jax_compilation_cache_dir"]
    if folder is None:
        yield
        return
    _use(None)
    try:
        yield
    finally:
        _use(folder)


def _use(folder: str | None) -> None:
    jax.config.update("jax_compilation_cache_dir", folder)
    compilation_cache.reset_cache()  # jax looks at the folder's name once


_theirs = current(_OPENED)


def get_file_cache(path: str) -> tuple[CacheInterface, str] | None:
    """What jax asks for compiled programs, and where it lies: a folder of ours, or as jax opens it."""
    found = (_folders[path], path) if path in _folders else _theirs(path)
    return None if found is None else (_NotedCache(found[0]), found[1])


replace(_OPENED, get_file_cache)

__all__ = [
    "WORTH_KEEPING_S",
    "ProgramFiles",
    "cache_requests",
    "default_folder",
    "files_in_use",
    "keep_no_programs",
    "keep_programs",
    "machine_name",
    "programs_not_kept",
]
