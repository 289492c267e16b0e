"""`torch.jax.Stream` and `Event`: there is one stream, in which operations run in the order of the program.

C++ makes `torch.Stream(device="jax")` and `torch.accelerator.current_stream()` itself: those wait for nothing. (Dynamo reads attributes of
the latter that only C++'s have, so it is not replaced.)

jax dispatches to each chip in order and keeps track of what needs what, so there is nothing to choose and nothing to wait for; what can be
waited for is that everything dispatched is done. Programs that name streams run, and mean the same.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import jax

from spmd.base._errors import SpmdError, message

_wait: list[Callable[[], None]] = []  # the device's `synchronize`


class Stream:
    """The stream: all are the same one. Arguments are CUDA's, and change nothing."""

    def __init__(self, device: Any = None, priority: int = 0, **options: Any) -> None:
        self.priority = 0

    def synchronize(self) -> None:
        """Wait until everything that was dispatched is done."""
        _wait[0]()

    def query(self) -> bool:
        """Whether everything that was dispatched is done."""
        return all(array.is_deleted() or array.is_ready() for array in jax.live_arrays())

    def wait_stream(self, stream: Any) -> None:
        """Nothing to do: what comes later runs later."""

    def wait_event(self, event: Any) -> None:
        """Nothing to do, as for `wait_stream`."""

    def record_event(self, event: Event | None = None) -> Event:
        """An event at this point."""
        event = Event() if event is None else event
        event.record(self)
        return event

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream)

    def __hash__(self) -> int:
        return 0

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *error: object) -> None:
        pass


class Event:
    """A point in the stream.

    Args:
        enable_timing: `record` waits until everything before is done, and takes the host's time; so times are true, and asking for them
            costs what waiting costs.
    """

    def __init__(self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False, **options: Any) -> None:
        self._is_timed = enable_timing
        self._time_s: float | None = None

    def record(self, stream: Any = None) -> None:
        """Set the event here."""
        if self._is_timed:
            _wait[0]()
            self._time_s = time.perf_counter()

    def wait(self, stream: Any = None) -> None:
        """Nothing to do: what comes later runs later."""

    def synchronize(self) -> None:
        """Wait until everything that was dispatched is done."""
        _wait[0]()

    def query(self) -> bool:
        """Whether everything that was dispatched is done, before the event and after it."""
        return Stream().query()

    def elapsed_time(self, end_event: Event) -> float:
        """Milliseconds to a later event.

        Raises:
            SpmdError: one of the two was made without `enable_timing=True`, or not recorded.
        """
        if self._time_s is None or end_event._time_s is None:
            what = "elapsed_time needs events with enable_timing=True that were recorded"
            raise SpmdError(message(what, fix="torch.jax.Event(enable_timing=True), then event.record()"))
        return (end_event._time_s - self._time_s) * 1e3


def current_stream(device: Any = None) -> Stream:
    """The stream."""
    return Stream()


def default_stream(device: Any = None) -> Stream:
    """The stream."""
    return Stream()


def set_stream(stream: Any) -> None:
    """Nothing to do: there is one."""


@contextmanager
def stream(stream: Any) -> Generator[None]:
    """Nothing to do: there is one."""
    yield


MEMBERS: tuple[Any, ...] = (Stream, Event, current_stream, default_stream, set_stream, stream)


def waiting_by(wait: Callable[[], None]) -> None:
    """How streams and events wait."""
    _wait[:] = [wait]


__all__ = ["MEMBERS", "Event", "Stream", "current_stream", "default_stream", "set_stream", "stream", "waiting_by"]
