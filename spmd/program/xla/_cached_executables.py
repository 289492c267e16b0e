"""Executables of earlier processes, found by digest: in jax's compilation cache, or in a file that the user saved.

An entry in the cache's folder maps a digest to the cache key under which jax stores the executable. See Note [Cached executables] in
`spmd.base._program_files` and Note [Digests of programs] in `_digest`.
"""

from __future__ import annotations

import json
import logging
from concurrent.futures import Future
from typing import Any

import jax

from spmd.base._jax_executables import Written, device_ids, loaded, packed_call, unpacked
from spmd.base._program_files import files_in_use
from spmd.program.xla._compile_threads import compile_threads

_HIT = "/jax/compilation_cache/cache_hits"  # jax's own event, so that code which counts cache hits also counts ours
_log = logging.getLogger("spmd.compile")


class CachedExecutable:
    """A serialized executable.

    Args:
        call: jax's metadata about the executable, from `packed_call`.
        devices: ids of the devices that it runs on.

    Attributes:
        executable: the executable as serialized by XLA.
    """

    def __init__(self, call: bytes, devices: list[int], executable: Written) -> None:
        self._call, self._devices, self.executable = call, devices, executable
        self._future: Future[Any] | None = None

    def begin(self, client: Any) -> None:
        """Start loading in another thread. The next `load` waits for that thread."""
        self._future = compile_threads().submit(self._load, client)

    def load(self, client: Any) -> Any:
        """jax's executable, ready to be called on the devices of `client`."""
        return self._load(client) if self._future is None else self._future.result()

    def _load(self, client: Any) -> Any:
        executable = loaded(self.executable, client, self._devices)
        return unpacked(self._call, executable, client)


def look_up(digest: str) -> CachedExecutable | None:
    """The executable for `digest` in the compilation cache. None if the cache is not in use or has no entry."""
    files = files_in_use()
    entry = None if files is None else files.get(_entry(digest))
    if files is None or entry is None:
        return None
    head, _, call = entry.partition(b"\n")
    about = json.loads(head)
    executable = files.get(about["key"])
    return None if executable is None else CachedExecutable(call, about["devices"], Written(executable, in_cache=True))


def store(digest: str, compiled: Any, key: str) -> None:
    """Add an entry for `digest` to the compilation cache.

    Args:
        compiled: jax's executable.
        key: the cache key under which jax stored it.
    """
    files = files_in_use()
    if files is None or not files.has(key):  # jax does not store programs that compile fast
        return
    try:
        call = packed_call(compiled)
    except ValueError:
        return
    files.put(_entry(digest), json.dumps({"key": key, "devices": device_ids(compiled)}).encode() + b"\n" + call)


def read(cached: CachedExecutable, client: Any, name: str) -> Any:
    """jax's executable. If it cannot be loaded, logs a warning and returns None."""
    try:
        found = cached.load(client)
    except Exception as error:  # jaxlib and pickle raise many types; the caller compiles instead
        _log.warning("the cached executable of %s cannot be loaded and is compiled again: %s", name, error)
        return None
    jax.monitoring.record_event(_HIT)
    return found


def _entry(digest: str) -> str:
    return f"traced-{digest}"


__all__ = ["CachedExecutable", "look_up", "read", "store"]
