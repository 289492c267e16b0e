"""What is being made now, and since when: what takes long is said while it does.

    with underway("compiling train_step for v5e:2x4"):
        ...

Costs a lock where something is traced or compiled, and nothing where a program runs. A thread that lives for as long as something is
underway looks twice a second; it keeps no process alive and writes nothing of what takes less than `configure(progress_after_s=)`.
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

_LOOK_S = 0.5
_REST_S = 5.0  # the thread outlives the last work by this: one for many small compilations
_GAP_S = 0.3  # eager compilations that follow each other this closely are one work
_COMPILATION = "/jax/core/compile/backend_compile_duration"  # a scalar of this name when one begins, a duration when it ends


class Work:
    """Something that is underway.

    Attributes:
        what: as it is said.
        start_s: of the monotonic clock.
        thread: that does it.
        num_said: how often it was said.
    """

    def __init__(self, what: str) -> None:
        self.what = what
        self.start_s = time.monotonic()
        self.thread = threading.get_ident()
        self.num_said = 0


class Progress:
    """All works of this process, and the thread that says the long ones."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Nothing is underway: a forked process has neither the thread nor the work."""
        self._line = ProgressLine()
        self._lock = threading.Lock()
        self._works: list[Work] = []
        self._eager: Work | None = None
        self._eager_count, self._eager_end_s = 0, 0.0
        self._thread: threading.Thread | None = None
        self._idle_since = 0.0

    def begin(self, work: Work) -> None:
        self._finish_eager(work.thread)
        with self._lock:
            self._works.append(work)
            if self._thread is None:
                self._thread = threading.Thread(target=self._watch, name="progress", daemon=True)
                self._thread.start()

    def end(self, work: Work) -> None:
        with self._lock:
            self._works.remove(work)
            took_s = time.monotonic() - work.start_s
            if work.num_said or took_s >= in_force.progress_after_s:
                self._line.ended(work.what, took_s)

    def begin_eager(self) -> None:
        """jax compiles something on this thread: by itself if no work is underway here."""
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
        """jax has compiled it; another one may follow at once."""
        if self._eager is not None and self._eager.thread == threading.get_ident():
            self._eager_end_s = time.monotonic()

    def _finish_eager(self, thread: int | None = None) -> None:
        """No eager operation follows at once: something else begins on this thread, or nothing."""
        eager = self._eager
        if eager is not None and thread in (None, eager.thread):
            self._eager, self._eager_end_s = None, 0.0
            with suppress(ValueError):  # ended by another thread meanwhile
                self.end(eager)

    def stop(self) -> None:
        """The process ends: take the line off."""
        with self._lock:
            self._line.clear()
            self._works = []

    def _watch(self) -> None:
        self._idle_since = time.monotonic()
        while True:
            time.sleep(min(_LOOK_S, max(in_force.progress_after_s / 4, 0.01)))
            if self._eager_end_s and time.monotonic() - self._eager_end_s > _GAP_S:
                self._finish_eager()
            with self._lock:
                now = time.monotonic()
                if self._works:
                    self._idle_since = now
                elif now - self._idle_since > _REST_S:
                    self._thread = None
                    return
                self._say(now)

    def _say(self, now: float) -> None:
        long = [work for work in self._works if now - work.start_s >= in_force.progress_after_s]
        for work in long:
            took_s = now - work.start_s
            if took_s >= _said_at(work.num_said, in_force.progress_after_s):
                work.num_said += 1
                self._line.log(work.what, took_s)
        self._line.show([(work.what, now - work.start_s) for work in long])


def _said_at(num_said: int, after_s: float) -> float:
    """Seconds after which a work is said in a line, for the first time and again."""
    times = (after_s, *(s for s in (10.0, 30.0, 60.0) if s > after_s))
    return times[num_said] if num_said < len(times) else times[-1] + 60.0 * (num_said - len(times) + 1)


def _operations(count: int) -> str:
    where = user_line()
    return ("compiling an operation" if count == 1 else f"compiling operations, {count} so far") + (f", at {where}" if where else "")


_progress = Progress()


@contextmanager
def underway(what: str) -> Generator[None]:
    """While active, `what` is done by this thread: said on stderr and through `logging` if it takes long."""
    work = Work(what)
    _progress.begin(work)
    try:
        yield
    finally:
        with suppress(ValueError):  # the process ends, or this is a fork of the one that began
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

__all__ = ["underway"]
