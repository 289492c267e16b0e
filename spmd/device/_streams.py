"""`torch.jax.Stream` and `torch.jax.Event`. There is one stream, in which operations run in program order.

C++ creates `torch.Stream(device="jax")` and `torch.accelerator.current_stream()` itself, and those never wait. (Dynamo reads attributes
of the latter that only C++ streams have, so it is not replaced.)

jax dispatches to each chip in order and tracks dependencies, so streams have nothing to order. Synchronizing waits until all dispatched
work is done. Programs that use streams run and have the same results.
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
    """The only stream; all instances are equal. The arguments are CUDA's and have no effect."""

    def __init__(self, device: Any = None, priority: int = 0, **options: Any) -> None:
        self.priority = 0

    def synchronize(self) -> None:
        """Wait until all dispatched work is done."""
        _wait[0]()

    def query(self) -> bool:
        """Whether all dispatched work is done."""
        return all(array.is_deleted() or array.is_ready() for array in jax.live_arrays())

    def wait_stream(self, stream: Any) -> None:
        """Does nothing: operations run in program order."""

    def wait_event(self, event: Any) -> None:
        """Does nothing: operations run in program order."""

    def record_event(self, event: Event | None = None) -> Event:
        """Record `event`, or a new one, at this point, and return it."""
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
        enable_timing: let `record` wait until all earlier work is done and take the host's time. The times are accurate, but each
            `record` then blocks.
    """

    def __init__(self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False, **options: Any) -> None:
        self._is_timed = enable_timing
        self._time_s: float | None = None

    def record(self, stream: Any = None) -> None:
        """Record the event at this point."""
        if self._is_timed:
            _wait[0]()
            self._time_s = time.perf_counter()

    def wait(self, stream: Any = None) -> None:
        """Does nothing: operations run in program order."""

    def synchronize(self) -> None:
        """Wait until all dispatched work is done, also work after the event."""
        _wait[0]()

    def query(self) -> bool:
        """Whether all dispatched work is done, also work after the event."""
        return Stream().query()

    def elapsed_time(self, end_event: Event) -> float:
        """Milliseconds to a later event.

        Raises:
            SpmdError: one of the events was created without `enable_timing=True` or was not recorded.
        """
        if self._time_s is None or end_event._time_s is None:
            what = "elapsed_time needs two recorded events with enable_timing=True"
            raise SpmdError(message(what, fix="torch.jax.Event(enable_timing=True), then event.record()"))
        return (end_event._time_s - self._time_s) * 1e3


def current_stream(device: Any = None) -> Stream:
    """The only stream."""
    return Stream()


def default_stream(device: Any = None) -> Stream:
    """The only stream."""
    return Stream()


def set_stream(stream: Any) -> None:
    """Does nothing: there is only one stream."""


@contextmanager
def stream(stream: Any) -> Generator[None]:
    """Does nothing: there is only one stream."""
    yield


MEMBERS: tuple[Any, ...] = (Stream, Event, current_stream, default_stream, set_stream, stream)


def waiting_by(wait: Callable[[], None]) -> None:
    """Set the function with which streams and events wait for the device."""
    _wait[:] = [wait]


__all__ = ["MEMBERS", "Event", "Stream", "current_stream", "default_stream", "set_stream", "stream", "waiting_by"]
