"""Executables that an earlier process made, by digest: in the folder of kept programs, or in a file that somebody saved.

In the folder an entry names the file in which jax keeps the executable; see Note [Cached executables] in `spmd.base._program_files` and
Note [Digests of programs] in `_digest`.
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

_HIT = "/jax/compilation_cache/cache_hits"  # who counts these wants to know of ours
_log = logging.getLogger("spmd.compile")


class KeptExecutable:
    """An executable as bytes.

    Args:
        call: what jax knows of it, by `packed_call`.
        devices: the ids of those that it runs on.

    Attributes:
        executable: as XLA writes it.
    """

    def __init__(self, call: bytes, devices: list[int], executable: Written) -> None:
        self._call, self._devices, self.executable = call, devices, executable
        self._future: Future[Any] | None = None

    def begin(self, client: Any) -> None:
        """Load it in another thread, for whoever asks next."""
        self._future = compile_threads().submit(self._load, client)

    def load(self, client: Any) -> Any:
        """jax's executable, ready to be called on the devices of a client."""
        return self._load(client) if self._future is None else self._future.result()

    def _load(self, client: Any) -> Any:
        executable = loaded(self.executable, client, self._devices)
        return unpacked(self._call, executable, client)


def kept_in_folder(digest: str) -> KeptExecutable | None:
    """The entry of the folder of kept programs, if that is in use and has one."""
    files = files_in_use()
    entry = None if files is None else files.get(_entry(digest))
    if files is None or entry is None:
        return None
    head, _, call = entry.partition(b"\n")
    about = json.loads(head)
    executable = files.get(about["key"])
    return None if executable is None else KeptExecutable(call, about["devices"], Written(executable, in_cache=True))


def keep_in_folder(digest: str, compiled: Any, key: str) -> None:
    """Note under which key of jax's the executable of a digest lies."""
    files = files_in_use()
    if files is None or not files.has(key):  # what is compiled in no time is not kept
        return
    try:
        call = packed_call(compiled)
    except ValueError:
        return
    files.put(_entry(digest), json.dumps({"key": key, "devices": device_ids(compiled)}).encode() + b"\n" + call)


def read(kept: KeptExecutable, client: Any, name: str) -> Any:
    """jax's executable, or None, with a line in the log, where it cannot be loaded."""
    try:
        found = kept.load(client)
    except Exception as error:  # whatever jaxlib and pickle raise: it is compiled again
        _log.warning("a kept program of %s is compiled again: %s", name, error)
        return None
    jax.monitoring.record_event(_HIT)
    return found


def _entry(digest: str) -> str:
    return f"traced-{digest}"


__all__ = ["KeptExecutable", "keep_in_folder", "kept_in_folder", "read"]
