"""Python's numbers for code in C that takes no others, and whose errors do not name the class of what it was given.

memoryview(data)[0] = n; deque(items, maxlen=n); a `__hash__` that returns n
"""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from spmd.device._numbers import is_program_number
from spmd.program.reads._number_calls import known
from spmd.program.reads._pending import Pending
from spmd.program.reads._varying import Varying

if TYPE_CHECKING:
    from spmd.program.reads._recorder import Recording


def is_own_number(value: Any) -> bool:
    """Whether it stands for a number, or for another plain value, of the program or of each call."""
    return type(value) in (Varying, Pending) or is_program_number(value)


def plain_number(value: Any) -> Any:
    """The Python number of this call; other values as they are.

    Raises:
        TraceError: only the device knows it.
    """
    if type(value) is Pending:
        raise value.needed("number")
    return value.concrete() if type(value) is Varying else known(value)


def limited_deque(recording: Recording, fn: Any, args: tuple[Any, ...], record: Callable[..., Any]) -> Callable[..., Any] | None:
    """The callable for `deque(items, maxlen=number)`, with its reads recorded; None for other calls."""
    if fn is not collections.deque or not any(map(is_own_number, args)):
        return None
    record(recording, fn, tuple(arg for arg in args if not is_own_number(arg)))
    return lambda *given, **options: fn(*map(_plain, given), **{name: _plain(value) for name, value in options.items()})


def _plain(value: Any) -> Any:
    return plain_number(value) if is_own_number(value) else value


class Bytes:
    """Takes the place of a memoryview to whose items a number is assigned."""

    __slots__ = ("_view",)

    def __init__(self, view: memoryview) -> None:
        self._view = view

    def __setitem__(self, key: Any, value: Any) -> None:
        self._view[key] = plain_number(value)


__all__ = ["Bytes", "limited_deque", "plain_number"]
