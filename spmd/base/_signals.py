"""Lets the handlers of signals wait while Python changes state that an exception would leave half changed.

Note [Handlers that wait]
    Python runs the handler of a signal between any two instructions of the main thread, and a handler may raise, as that of Ctrl-C does.
    After a program is dispatched, the memory of the old state is gone, and the new state is in a local variable of jax's. While a trace
    begins or ends, functions, buffers and settings are replaced or put back. An exception there would lose the state, or leave what was
    replaced. So handlers wait until the state is whole (`handlers_wait`). They run at once while code runs that may take long: the
    traced function, the compiler (`handlers_run`). To wait costs some microseconds.
"""

from __future__ import annotations

import _signal  # pyright: ignore[reportMissingImports]  # signal's own functions convert to enums, which takes ten times as long
import operator
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from itertools import repeat
from types import FrameType
from typing import Any

_get: Callable[[int], Any] = _signal.getsignal  # pyright: ignore[reportUnknownMemberType]
_set: Callable[[int, Any], Any] = _signal.signal  # pyright: ignore[reportUnknownMemberType]
_SIGNALS = tuple(sorted(int(number) for number in signal.valid_signals() if number < 32))  # without those of real time


class _Handlers:
    """The handlers of the main thread, in which Python runs all of them.

    Attributes:
        is_waiting: whether signals are noted instead.
    """

    def __init__(self) -> None:
        self.is_waiting = False
        self._all: list[Any] = []  # of all signals, when they were replaced last
        self._own: dict[int, Any] = {}  # those that are Python code, by signal
        self._arrived: list[tuple[Any, int, FrameType | None]] = []
        self._note = self._note_signal  # one object, to compare

    def _note_signal(self, number: int, frame: FrameType | None) -> None:
        self._arrived.append((self._own[number], number, frame))

    def of(self, number: int) -> Any:
        """The handler of a signal, or the user's that waits."""
        found = signal.getsignal(number)
        return self._own[number] if found is self._note else found

    def let_wait(self) -> None:
        """Note signals from now on."""
        found = list(map(_get, _SIGNALS))
        if found != self._all:
            self._own = {number: handler for number, handler in zip(_SIGNALS, found, strict=True) if callable(handler)}
            self._all = found
        self.is_waiting = True
        try:
            deque(map(_set, self._own, repeat(self._note)), maxlen=0)  # in one call of C, so that no handler runs in between
        except BaseException:  # of one that ran before
            _set_all(self._own, repeat(self._note))
            raise

    def let_run(self) -> None:
        """Restore the handlers, and run those whose signals have arrived; the first error is raised at the end."""
        own = self._own
        if not all(map(operator.is_, map(_get, own), repeat(self._note))):  # a compiled function may set a handler
            own = {number: handler for number, handler in own.items() if _get(number) is self._note}
        self.is_waiting = False
        try:
            deque(map(_set, own, own.values()), maxlen=0)
        except BaseException:
            _set_all(own, own.values())
            raise
        finally:
            if self._arrived:
                self._run_arrived()

    def _run_arrived(self) -> None:
        handler, number, frame = self._arrived.pop(0)
        try:
            handler(number, frame)
        finally:
            if self._arrived:
                self._run_arrived()


def _set_all(numbers: Iterable[int], handlers: Iterable[Any]) -> None:
    """Set handlers, and again if one that runs before that raises."""
    try:
        deque(map(_set, numbers, handlers), maxlen=0)
    except BaseException:
        _set_all(numbers, handlers)
        raise


_HANDLERS = _Handlers()


class _Switch:
    """A context in which handlers wait, or run. In other threads than the main one it does nothing."""

    def __init__(self, waits: bool) -> None:
        self._waits = waits
        self._changes = False

    def __enter__(self) -> None:
        if _HANDLERS.is_waiting is not self._waits and threading.get_ident() == _main_thread[0]:
            self._changes = True
            enter, leave = (_HANDLERS.let_wait, _HANDLERS.let_run) if self._waits else (_HANDLERS.let_run, _HANDLERS.let_wait)
            try:
                enter()
            except BaseException:
                leave()
                raise

    def __exit__(self, *_: object) -> None:
        if self._changes and self._waits:
            _HANDLERS.let_run()
        elif self._changes:
            _HANDLERS.let_wait()


def _note_main_thread() -> None:
    _main_thread[:] = [threading.main_thread().ident]


_main_thread: list[int | None] = [threading.main_thread().ident]
os.register_at_fork(after_in_child=_note_main_thread)


def handler_of(number: int) -> Any:
    """`signal.getsignal(number)`, also within `handlers_wait`."""
    return _HANDLERS.of(number)


# Contexts in which the handlers of signals wait for their end, and, within those, run at once. See Note [Handlers that wait].
handlers_wait = partial(_Switch, waits=True)
handlers_run = partial(_Switch, waits=False)

__all__ = ["handler_of", "handlers_run", "handlers_wait"]
