"""Executables of earlier processes, found by digest: in jax's compilation cache, or in a file that the user saved.

An entry in the cache's folder maps a digest to the cache key under which jax stores the executable, or contains the lowered program, if the
executable must not be read (Note [Collectives that lose their order]). See Note [Cached executables] in `spmd.base._program_files` and
Note [Digests of programs] in `_digest`.
"""

from __future__ import annotations

import json
import logging
from concurrent.futures import Future
from typing import Any

import jax

from spmd.base._convert import exact_dtypes
from spmd.base._jax_executables import (
    Written,
    device_ids,
    is_in_order_when_read,
    loaded,
    packed_call,
    packed_lowering,
    unpacked,
    unpacked_lowering,
)
from spmd.base._program_files import files_in_use
from spmd.program.xla._compile_options import compiled
from spmd.program.xla._compile_threads import compile_threads

_HIT = "/jax/compilation_cache/cache_hits"  # jax's own event, so that code which counts cache hits also counts ours
_log = logging.getLogger("spmd.compile")


class Cached:
    """What an earlier process has left of an executable.

    Attributes:
        doing: what `load` does, for progress lines.
        executable: the executable as serialized by XLA; None if it is compiled again.
    """

    doing = "reading"
    executable: Written | None = None
    _future: Future[Any] | None = None

    def begin(self, client: Any) -> None:
        """Start loading in another thread. The next `load` waits for that thread."""
        self._future = compile_threads().submit(self._load, client)

    def load(self, client: Any) -> Any:
        """jax's executable, ready to be called on the devices of `client`."""
        return self._load(client) if self._future is None else self._future.result()

    def _load(self, client: Any) -> Any:
        raise NotImplementedError


class CachedExecutable(Cached):
    """A serialized executable.

    Args:
        call: jax's metadata about the executable, from `packed_call`.
        devices: ids of the devices that it runs on.
        executable: see `Cached`.
    """

    def __init__(self, call: bytes, devices: list[int], executable: Written) -> None:
        self._call, self._devices, self._written = call, devices, executable
        self.executable = executable

    def _load(self, client: Any) -> Any:
        return unpacked(self._call, loaded(self._written, client, self._devices), client)


class CachedLowering(Cached):
    """A serialized lowered program, from `packed_lowering`."""

    doing = "compiling"

    def __init__(self, content: bytes) -> None:
        self._content = content

    def _load(self, client: Any) -> Any:
        with exact_dtypes():
            return compiled(unpacked_lowering(self._content, client), client.platform)


def look_up(digest: str) -> Cached | None:
    """What the compilation cache has for `digest`. None if the cache is not in use or has no entry."""
    files = files_in_use()
    entry = None if files is None else files.get(_entry(digest))
    if files is None or entry is None:
        return None
    head, _, content = entry.partition(b"\n")
    about = json.loads(head)
    if about["key"] is None:
        return CachedLowering(content)
    executable = files.get(about["key"])
    return None if executable is None else CachedExecutable(content, about["devices"], Written(executable, in_cache=True))


def store(digest: str, executable: Any, key: str, lowering: jax.stages.Lowered) -> None:
    """Add an entry for `digest` to the compilation cache.

    Args:
        executable: jax's executable.
        key: the cache key under which jax stored it, unless it must not be read.
        lowering: the program from which it was compiled.
    """
    files = files_in_use()
    if files is None:
        return
    try:
        if files.has(key):
            about, content = {"key": key, "devices": device_ids(executable)}, packed_call(executable)
        elif not is_in_order_when_read(executable.runtime_executable()):
            about, content = {"key": None}, packed_lowering(lowering)
        else:  # jax does not store programs that compile fast
            return
    except ValueError:
        return
    files.put(_entry(digest), json.dumps(about).encode() + b"\n" + content)


def read(cached: Cached, client: Any, name: str) -> Any:
    """jax's executable. If it cannot be loaded, logs a warning and returns None."""
    try:
        found = cached.load(client)
    except Exception as error:  # jaxlib and pickle raise many types; the caller compiles instead
        _log.warning("the cached executable of %s cannot be loaded and is compiled again: %s", name, error)
        return None
    if cached.executable is not None:
        jax.monitoring.record_event(_HIT)
    return found


def _entry(digest: str) -> str:
    return f"traced-{digest}"


__all__ = ["Cached", "CachedExecutable", "look_up", "read", "store"]
