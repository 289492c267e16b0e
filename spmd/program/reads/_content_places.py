"""Places for what is stored in C: cells, the content of sets, arrays, functions and the like, and attributes."""

from __future__ import annotations

import array
import ctypes
import decimal
import threading
import types
import weakref
from collections.abc import Callable
from contextvars import ContextVar
from functools import partial
from operator import attrgetter
from typing import Any

import numpy as np

from spmd.program.reads._decimal_flags import digits_of
from spmd.program.reads._hidden_state import IN_MEMORY, SIGNALS, stream_content
from spmd.program.reads._images import is_image, pixels_of
from spmd.program.reads._number_place import ABSENT
from spmd.program.reads._places import CDATA, PLAIN, ContentPlace, ValuePlace, content_of


class CellPlace(ValuePlace):
    """The cell of a closure variable."""

    __slots__ = ()

    def __init__(self, cell: types.CellType, name: str) -> None:
        super().__init__(cell, name, lambda: content_of(cell), partial(setattr, cell, "cell_contents"))


class FunctionPlace(ContentPlace):
    """The code and the defaults of a function."""

    __slots__ = ()

    def __init__(self, fn: types.FunctionType, title: str) -> None:
        super().__init__(fn, title, lambda: _definition(fn))


class AttributePlace(ValuePlace):
    """An attribute that is stored in C: a function's name, an array's shape.

    Attributes:
        name: its name.
        getter: reads it.
    """

    __slots__ = ("getter", "name")

    def __init__(self, instance: Any, name: str, title: str) -> None:
        self.name, self.getter = name, attrgetter(name)
        super().__init__(instance, title, lambda: getattr(instance, name, ABSENT))


def content_place(value: Any, title: str) -> ContentPlace | None:
    """The place for the whole content of `value`, if it is mutable and neither a dict nor a list."""
    if isinstance(value, types.FunctionType):
        return FunctionPlace(value, title)
    read = _reader_of(value)
    return None if read is None else ContentPlace(value, title, read)


def _reader_of(value: Any) -> Callable[[], Any] | None:
    if isinstance(value, (set, frozenset)):
        return lambda: frozenset(value) if all(isinstance(v, PLAIN) for v in value) else tuple(sorted(map(id, value)))
    if isinstance(value, np.ndarray) and value.dtype.hasobject:
        return lambda: tuple(value.ravel().tolist())
    if isinstance(value, np.ndarray):
        return lambda: (value.shape, value.dtype.str, value.tobytes(), value.flags.writeable)
    if isinstance(value, memoryview):
        return lambda: _bytes_of(value)
    if isinstance(value, (bytearray, array.array)):
        return lambda: bytes(value)
    if isinstance(value, IN_MEMORY):
        return lambda: stream_content(value)
    if isinstance(value, ContextVar):
        return lambda: value.get(ABSENT)
    if isinstance(value, CDATA):
        return lambda: ctypes.string_at(ctypes.addressof(value), ctypes.sizeof(value))
    if isinstance(value, weakref.ReferenceType):
        return lambda: value() is None
    if type(value) is SIGNALS:
        return lambda: tuple(signal for signal, is_raised in value.items() if is_raised)
    if isinstance(value, decimal.Context):
        return lambda: digits_of(value)
    if isinstance(value, np.void):
        return lambda: (value.dtype.str, value.tobytes())
    if is_image(value):
        return lambda: pixels_of(value)
    if isinstance(value, threading.local):
        return threading.get_ident  # each thread has its own attributes
    return None


def _bytes_of(view: memoryview) -> Any:
    try:
        return bytes(view)
    except ValueError:  # released
        return ABSENT


def _definition(fn: types.FunctionType) -> tuple[Any, ...]:
    from spmd.program.reads._swap import code_of

    return (code_of(fn), fn.__defaults__, fn.__kwdefaults__ is None, *(fn.__kwdefaults__ or {}).items())
