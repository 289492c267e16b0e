"""The persistent compilation cache: compiled programs as files, for later processes.

Note [Cached executables]
The files in the folder are executed. So the folder must belong to this user, and a folder that others can write to is refused.
The name of a file is jax's cache key (program, options, versions, devices). There is a subfolder for each kind of machine, since a
program for a CPU uses the instructions of this CPU. A file contains its checksum, is written under a temporary name first, and is
removed if it is damaged. If all files together are too large, the least recently read ones are removed. A failure of the cache
never fails a compilation. Executables that could hang when they are read are not cached, in jax's own caches neither: see
Note [Collectives that lose their order] in `_jax_executables`.
"""

from __future__ import annotations

import hashlib
import logging
import os
import platform
import stat
import tempfile
import threading
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import jax
from jax.experimental.compilation_cache import compilation_cache

from spmd.base._errors import SpmdError, message
from spmd.base._jax import CacheInterface
from spmd.base._jax_executables import is_in_order_when_read
from spmd.patches._table import current, replace

WORTH_KEEPING_S = 0.01  # programs that compile in less time are not cached: the smallest takes 3 ms to read
_PUTS_PER_SCAN = 64  # other processes write to the folder too
_MAGIC = b"spmd program 1\n"
_ENDING = ".program"
_MACHINE = "machine-"
_FORM = "2"  # of a machine's folder. 1: it could contain programs that hang when they are read
_GET_FILE_CACHE = "jax._src.compilation_cache.get_file_cache"
_PUT = "jax._src.compilation_cache.put_executable_and_time"
_folders: dict[str, ProgramFiles] = {}
_thread = threading.local()
_log = logging.getLogger("spmd.compile")


def default_folder() -> Path:
    """The default cache folder: `spmd` in the user's cache directory."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "spmd"


class ProgramFiles(CacheInterface):
    """A compilation cache for jax in a folder. See Note [Cached executables].

    Args:
        folder: created with mode 0700 if it does not exist.
        max_bytes: limit for all files together.

    Raises:
        SpmdError: the folder cannot be created or written to, or other users can write to it.
    """

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self.folder, self.max_bytes = folder, max_bytes
        self._path = folder / machine_name()
        self._room, self._puts = 0, 0  # bytes left at the last scan of the folder less those written since, and the number of writes
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
        """The bytes cached under a key; None if there are none, or if they are damaged."""
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

    def newest(self, keys: Sequence[str]) -> Any:
        """The bytes under the key that was written or read last; None if there are none, or if they are damaged."""
        times: list[tuple[float, str]] = []
        for key in keys:
            with suppress(OSError):
                times.append(((self._path / (key + _ENDING)).stat().st_mtime, key))
        return self.get(max(times)[1]) if times else None

    def has(self, key: str) -> bool:
        """Whether the cache has an entry for a key."""
        return (self._path / (key + _ENDING)).exists()

    def put(self, key: str, value: bytes) -> None:
        """Cache bytes under a key, atomically. A failure is only logged."""
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
        self._room -= len(_MAGIC) + hashlib.sha256().digest_size + len(value)
        self._puts += 1
        if self._room < 0 or self._puts % _PUTS_PER_SCAN == 0:  # a scan for every program would take longer than writing it
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        """If the limit is exceeded, remove the least recently read files, down to nine tenths of it, so that not every later write scans.

        Temporary files of killed processes are among them.
        """
        found: list[tuple[float, int, Path]] = []
        for path in self.folder.glob(f"{_MACHINE}*/*"):
            with suppress(OSError):  # another process removed it
                seen = path.stat()
                found.append((seen.st_mtime, seen.st_size, path))
        total = sum(size for _, size, _ in found)
        target = self.max_bytes if total <= self.max_bytes else self.max_bytes * 0.9
        for _, size, path in sorted(found):
            if total <= target:
                break
            with suppress(OSError):
                path.unlink()
            total -= size
        self._room = self.max_bytes - total


def _require_own(folder: Path) -> None:
    """Raise an SpmdError if other users own a folder or can write to it."""
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
    """A folder name shared by machines whose CPU has the same model and instructions."""
    facts = [_FORM, platform.machine(), platform.system()]
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        facts += sorted({line for line in lines if line.startswith(("flags", "Features", "model name"))})
    return _MACHINE + hashlib.sha256("\n".join(facts).encode()).hexdigest()[:16]


def keep_programs(folder: Path, max_bytes: int) -> None:
    """Make jax cache compiled programs in a folder from now on.

    Raises:
        SpmdError: the folder cannot be used (see `ProgramFiles`).
    """
    _folders[str(folder)] = ProgramFiles(folder, max_bytes)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", WORTH_KEEPING_S)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    _use(str(folder))


def keep_no_programs() -> None:
    """Make jax stop using a persistent compilation cache."""
    _use(None)


def files_in_use() -> ProgramFiles | None:
    """The `ProgramFiles` that jax uses now; None if it uses none, or a cache of its own."""
    folder = jax.config.values["jax_compilation_cache_dir"]
    return _folders.get(folder) if jax.config.values["jax_enable_compilation_cache"] else None


@dataclass
class CacheRequest:
    """The last cache request of jax: the key, and the value that it got (None on a miss)."""

    key: str | None = None
    value: bytes | None = None


@contextmanager
def cache_requests() -> Generator[CacheRequest]:
    """Record jax's last cache request on this thread while active."""
    before, _thread.request = getattr(_thread, "request", None), CacheRequest()
    try:
        yield _thread.request
    finally:
        _thread.request = before


class _RecordingCache(CacheInterface):
    """Wraps a cache and records requests for `cache_requests`."""

    def __init__(self, files: Any) -> None:
        self._files, self._path = files, files._path

    def get(self, key: str) -> Any:
        value = self._files.get(key)
        request = getattr(_thread, "request", None)
        if request is not None:
            request.key, request.value = key, value
        return value

    def put(self, key: str, value: bytes) -> None:
        self._files.put(key, value)


@contextmanager
def programs_not_kept() -> Generator[None]:
    """While active, jax does not use its cache: it cannot read programs for devices that this machine lacks, and warns about each."""
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
    compilation_cache.reset_cache()  # jax reads the folder's name only once


_original = current(_GET_FILE_CACHE)


def get_file_cache(path: str) -> tuple[CacheInterface, str] | None:
    """Replaces jax's function: the cache in folder `path` and its path. Folders that are not `ProgramFiles` are opened by jax."""
    found = (_folders[path], path) if path in _folders else _original(path)
    return None if found is None else (_RecordingCache(found[0]), found[1])


_put = current(_PUT)


def put_executable_and_time(cache_key: str, module_name: str, executable: Any, backend: Any, compile_time: int) -> None:
    """Replaces jax's function: executables that could hang when they are read are not cached."""
    if is_in_order_when_read(executable):
        _put(cache_key, module_name, executable, backend, compile_time)
    else:
        _log.debug("%s is not cached: it has collectives in a loop and outside it, and could hang when it is read", module_name)


replace(_GET_FILE_CACHE, get_file_cache)
replace(_PUT, put_executable_and_time)

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
