"""Progress reports of slow work (traces, compilations) while it runs.

    with underway("compiling train_step for v5e:2x4"):
        ...

The cost is one lock per trace or compilation, and none when a program runs. A daemon thread, which exists only while there is
work, checks twice a second. Work that takes less than `configure(progress_after_s=)` is not reported.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress

import jax.monitoring

from spmd.base._errors import user_line
from spmd.base._progress_line import ProgressLine
from spmd.base._settings import in_force

PROGRESS = "progress"  # the name of the thread
_CHECK_INTERVAL_S = 0.5
_IDLE_S = 5.0  # the thread ends after this time without work, so that many small compilations share one thread
_GAP_S = 0.3  # eager compilations with shorter gaps between them are reported as one
_COMPILATION = "/jax/core/compile/backend_compile_duration"  # jax emits a scalar of this name at the begin, a duration at the end


class Work:
    """A piece of work in progress.

    Attributes:
        what: description, as reported.
        start_s: start time of the monotonic clock, in seconds.
        thread: id of the thread that does it.
        num_reports: number of reports so far.
    """

    def __init__(self, what: str) -> None:
        self.what = what
        self.start_s = time.monotonic()
        self.thread = threading.get_ident()
        self.num_reports = 0


class Progress:
    """All work in progress in this process, and the thread that reports it."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Reset everything. Called in a forked process, which has neither the thread nor the work."""
        self._line = ProgressLine()
        self._lock = threading.Lock()
        self._works: list[Work] = []
        self._eager: Work | None = None
        self._eager_count, self._eager_end_s = 0, 0.0
        self._thread: threading.Thread | None = None
        self._idle_since = 0.0

    def begin(self, work: Work) -> None:
        """Add work, and start the thread if it is not running."""
        self._finish_eager(work.thread)
        with self._lock:
            self._works.append(work)
            if self._thread is None:
                self._thread = threading.Thread(target=self._watch, name=PROGRESS, daemon=True)
                self._thread.start()

    def end(self, work: Work) -> None:
        """Remove work, and report its duration if it took long.

        Raises:
            ValueError: the work is not in progress.
        """
        with self._lock:
            self._works.remove(work)
            took_s = time.monotonic() - work.start_s
            if work.num_reports or took_s >= in_force.progress_after_s:
                self._line.ended(work.what, took_s)

    def begin_eager(self) -> None:
        """jax begins a compilation on this thread. It is an eager operation's unless this thread has work in progress."""
        own, eager = threading.get_ident(), self._eager
        if any(work.thread == own and work is not eager for work in self._works):
            return
        if eager is None:
            eager = Work(_operations(1))
            self.begin(eager)
            self._eager, self._eager_count, self._eager_end_s = eager, 1, 0.0
        elif eager.thread == own:
            self._eager_count += 1
            eager.what = _operations(self._eager_count)
            self._eager_end_s = 0.0

    def end_eager(self) -> None:
        """jax has finished a compilation on this thread. Another one may follow within `_GAP_S`."""
        if self._eager is not None and self._eager.thread == threading.get_ident():
            self._eager_end_s = time.monotonic()

    def _finish_eager(self, thread: int | None = None) -> None:
        """End the work of eager compilations, on `thread` or (None) on any thread."""
        eager = self._eager
        if eager is not None and thread in (None, eager.thread):
            self._eager, self._eager_end_s = None, 0.0
            with suppress(ValueError):  # another thread has ended it meanwhile
                self.end(eager)

    def stop(self) -> None:
        """Clear the status line. Called at the end of the process."""
        with self._lock:
            self._line.clear()
            self._works = []

    def _watch(self) -> None:
        """The thread: report work that takes long, until there has been none for `_IDLE_S`."""
        self._idle_since = time.monotonic()
        while True:
            time.sleep(min(_CHECK_INTERVAL_S, max(in_force.progress_after_s / 4, 0.01)))
            if self._eager_end_s and time.monotonic() - self._eager_end_s > _GAP_S:
                self._finish_eager()
            with self._lock:
                now = time.monotonic()
                if self._works:
                    self._idle_since = now
                elif now - self._idle_since > _IDLE_S:
                    self._thread = None
                    return
                self._report(now)

    def _report(self, now: float) -> None:
        long = [work for work in self._works if now - work.start_s >= in_force.progress_after_s]
        for work in long:
            took_s = now - work.start_s
            if took_s >= _report_time_s(work.num_reports, in_force.progress_after_s):
                work.num_reports += 1
                self._line.log(work.what, took_s)
        self._line.show([(work.what, now - work.start_s) for work in long])


def _report_time_s(num_reports: int, after_s: float) -> float:
    """Seconds from the start of work to its next report in a line: `after_s`, 10, 30, 60 and then every 60 s."""
    times = (after_s, *(s for s in (10.0, 30.0, 60.0) if s > after_s))
    return times[num_reports] if num_reports < len(times) else times[-1] + 60.0 * (num_reports - len(times) + 1)


def _operations(count: int) -> str:
    where = user_line()
    return ("compiling an operation" if count == 1 else f"compiling operations, {count} so far") + (f", at {where}" if where else "")


_progress = Progress()


@contextmanager
def underway(what: str) -> Generator[None]:
    """While active, this thread does `what`. It is reported on stderr and through `logging` if it takes long."""
    work = Work(what)
    _progress.begin(work)
    try:
        yield
    finally:
        with suppress(ValueError):  # the process ends, or is a fork of the one in which the work began
            _progress.end(work)


def _note_begin(event: str, value: float | int, **about: str | int) -> None:
    if event == _COMPILATION:
        _progress.begin_eager()


def _note_end(event: str, duration_secs: float, **about: str | int) -> None:
    if event == _COMPILATION:
        _progress.end_eager()


jax.monitoring.register_scalar_listener(_note_begin)
jax.monitoring.register_event_duration_secs_listener(_note_end)
atexit.register(_progress.stop)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_progress.forget)

__all__ = ["PROGRESS", "underway"]
