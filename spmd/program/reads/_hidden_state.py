"""Objects in C that change when they are called: files, locks, and those whose state Python cannot read (hashes, compressors).

print(text, file=sys.stderr); log.write(text)    # output: written while the function is traced, as by print
buffer.write(text)                               # a StringIO is a container: every call writes
digest.update(data)                              # refused for a hash from before the call
"""

from __future__ import annotations

import contextvars
import ctypes
import decimal
import io
import re
import sys
import threading
import types
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, cast

from spmd.program.find._static import is_python_class
from spmd.program.reads._images import is_part_of_image

IN_MEMORY = (io.StringIO, io.BytesIO)
_OUTPUT = frozenset(
    ("write", "writelines", "flush", "isatty", "fileno", "readable", "writable", "seekable", "__enter__", "__exit__", "close")
)
POINTER: Any = ctypes.POINTER(ctypes.c_int).__mro__[1]
SIGNALS = type(decimal.Context().flags)  # of the flags and the traps of a context
_HELD = re.compile(r"count=(\d+)")
_HIDDEN = (type(re.compile("").scanner("")), type(ctypes.byref(ctypes.c_int())), contextvars.Context)  # type: ignore[attr-defined]
# modules of Python whose types in C are immutable, or recorded as containers, iterators, generators and settings
_WITHOUT_HIDDEN_STATE = frozenset(
    (
        *("builtins", "datetime", "decimal", "_decimal", "re", "_sre", "_struct", "functools", "operator", "types", "weakref", "_weakref"),
        *("_thread", "contextvars", "_contextvars", "collections", "array", "_ctypes", "ctypes", "itertools", "os", "posix", "time"),
        *("abc", "_abc", "ast", "_ast", "unicodedata", "random", "_random", "io", "_io", "sys", "typing", "_typing", "_string", "zoneinfo"),
    )
)


def is_output(stream: Any, name: str = "") -> bool:
    """Whether a stream is written to only, or its method `name` only writes. What a function writes is written by its traces."""
    if any(stream is standard for standard in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__)):
        return True
    if not isinstance(stream, io.IOBase) or is_in_memory(stream):
        return False
    return name in _OUTPUT or (type(stream).__module__ in ("io", "_io") and not stream.closed and not stream.readable())


def is_in_memory(stream: Any) -> bool:
    """Whether a file of Python's own classes writes to one in memory."""
    while type(stream).__module__ in ("io", "_io") and not getattr(stream, "closed", True):
        below = getattr(stream, "buffer", None) or getattr(stream, "raw", None)
        if below is None:
            break
        stream = below
    return isinstance(stream, IN_MEMORY)


def stream_content(stream: Any) -> tuple[Any, int] | None:
    """The content of a file in memory, and its position; None if it is closed."""
    return None if stream.closed else (stream.getvalue(), stream.tell())


def put_stream(stream: Any, content: tuple[Any, int] | None) -> None:
    """Set the content of a file in memory. Nothing can open one again that the function has closed, which is refused."""
    if content is None or stream.closed:
        stream.close()
        return
    stream.seek(0)
    stream.truncate()
    stream.write(content[0])
    stream.seek(content[1])


@cache
def has_hidden_state(cls: type) -> bool:
    """Whether objects of a class in C have state that Python cannot read and set."""
    if cls is types.CoroutineType or cls in _HIDDEN or issubclass(cls, POINTER) or is_part_of_image(cls):
        return True
    if issubclass(cls, ctypes.Array) and issubclass(cast(type, cls._type_), POINTER):
        return True
    if issubclass(cls, (tuple, BaseException, Iterator)):
        return False
    in_c = next(base for base in cls.__mro__ if not _is_of_python(base))
    name = in_c.__module__.partition(".")[0]
    return name in sys.stdlib_module_names and name not in _WITHOUT_HIDDEN_STATE


def _is_of_python(cls: type) -> bool:
    """Whether a class is defined in Python. Some classes in C look alike but for the places of attributes."""
    return is_python_class(cls) and (bool(cls.__dictoffset__) or "__slots__" in vars(cls))


def _lock(lock: Any) -> tuple[Callable[[], bool], Callable[[bool], None]]:
    """Functions that read and set whether a lock is held."""

    def put(is_held: bool) -> None:
        if is_held:
            lock.acquire(blocking=False)
        elif lock.locked():
            lock.release()

    return lock.locked, put


def _recursive_lock(lock: Any) -> tuple[Callable[[], int], Callable[[int], None]]:
    """Functions that read and set how often this thread holds a recursive lock."""

    def read() -> int:
        found = _HELD.search(repr(lock))  # the only place that says it
        return int(found.group(1)) if found is not None and lock._is_owned() else 0

    def put(times: int) -> None:
        for _ in range(times - read()):
            lock.acquire(blocking=False)
        for _ in range(read() - times):
            lock.release()

    return read, put


LOCKS: dict[type, Callable[[Any], tuple[Callable[[], Any], Callable[[Any], None]]]] = {
    type(threading.Lock()): _lock,
    type(threading.RLock()): _recursive_lock,
}


def lock_question(lock: Any, title: str) -> tuple[tuple[Any, ...], str, Callable[[], Any]]:
    """The question whether a lock is held, as in `_questions`."""
    return (id(lock), "locked"), f"{title}.locked()", LOCKS[type(lock)](lock)[0]


__all__ = [
    "IN_MEMORY",
    "LOCKS",
    "POINTER",
    "SIGNALS",
    "has_hidden_state",
    "is_in_memory",
    "is_output",
    "lock_question",
    "put_stream",
    "stream_content",
]
