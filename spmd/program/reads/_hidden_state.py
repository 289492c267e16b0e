"""Objects in C that change when they are called: files, and those whose state Python cannot read (hashes, compressors, writers of CSV).

print(text, file=sys.stderr); log.write(text)    # output: written while the function is traced, as by print
buffer.write(text)                               # a StringIO is a container: every call writes
digest.update(data)                              # refused for a hash from before the call
"""

from __future__ import annotations

import builtins
import io
import sys
import types
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

IN_MEMORY = (io.StringIO, io.BytesIO)
_OUTPUT = frozenset(
    ("write", "writelines", "flush", "isatty", "fileno", "readable", "writable", "seekable", "__enter__", "__exit__", "close")
)
# modules of Python whose types in C are immutable, or recorded as containers, iterators, generators and settings
_WITHOUT_HIDDEN_STATE = frozenset(
    (
        *("builtins", "datetime", "decimal", "_decimal", "re", "_sre", "_struct", "functools", "operator", "types", "weakref", "_weakref"),
        *("_thread", "contextvars", "_contextvars", "collections", "array", "_ctypes", "ctypes", "itertools", "os", "posix", "time"),
        *("abc", "_abc", "ast", "_ast", "unicodedata", "random", "_random", "io", "_io", "sys", "typing", "_typing", "_string", "socket"),
    )
)


def is_output(stream: Any, name: str = "") -> bool:
    """Whether a stream is written to only, or its method `name` only writes. What a function writes is written by its traces."""
    if any(stream is standard for standard in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__)):
        return True
    if not isinstance(stream, io.IOBase) or isinstance(stream, IN_MEMORY):
        return False
    return name in _OUTPUT or (type(stream).__module__ in ("io", "_io") and not stream.closed and not stream.readable())


def stream_content(stream: Any) -> tuple[Any, int] | None:
    """The content of a file in memory, and its position; None if it is closed."""
    return None if stream.closed else (stream.getvalue(), stream.tell())


def put_stream(stream: Any, content: tuple[Any, int] | None) -> None:
    """Set the content of a file in memory."""
    if content is None:
        stream.close()
        return
    stream.seek(0)
    stream.truncate()
    stream.write(content[0])
    stream.seek(content[1])


@cache
def has_hidden_state(cls: type) -> bool:
    """Whether objects of a class in C have state that Python cannot read and set."""
    if cls is types.CoroutineType:
        return True
    name = cls.__module__.partition(".")[0]
    return name in sys.stdlib_module_names and name not in _WITHOUT_HIDDEN_STATE and not (issubclass(cls, Iterator) or _is_of_python(cls))


def _is_of_python(cls: type) -> bool:
    """Whether a class is defined in Python: its instances' state is in attributes."""
    return bool(cls.__dictoffset__) or "__slots__" in cls.__dict__ or issubclass(cls, (tuple, builtins.BaseException))


def lock_setting(lock: Any) -> tuple[Callable[[], bool], Callable[[bool], None]]:
    """Functions that read and set whether a lock is held."""

    def put(is_held: bool) -> None:
        if is_held:
            lock.acquire(blocking=False)
        elif lock.locked():
            lock.release()

    return lock.locked, put


__all__ = ["IN_MEMORY", "has_hidden_state", "is_output", "lock_setting", "put_stream", "stream_content"]
