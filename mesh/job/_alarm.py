"""Alarm: exits of a process that must end the whole job. Each is reported once, in one line, and never blocks.

An exception in one process leaves the others in a collective that never completes, and jax's own shutdown waits minutes
for them. So the first failure is announced to all, each writes one line, and each leaves at once by its exit code.
Knows nothing of jax; how a failure is announced is handed in.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from types import TracebackType
from typing import Any

from mesh.job._place import PEER_FAILED, STUCK, Host
from mesh.job._records import write_record

_ANNOUNCE_S = 0.3


class Alarm:
    """Ends this process.

    Args:
        host: this process.
        announce: tells the other processes (kind, and what of it); may fail or block, and is not waited for long.
    """

    def __init__(self, host: Host, announce: Callable[..., None]) -> None:
        self._host, self._announce = host, announce
        self._lock = threading.Lock()

    def install(self) -> None:
        """From now on an exception that nobody catches, in any thread, ends the job; a crash prints where it was."""
        sys.excepthook = self._on_exception
        threading.excepthook = self._on_thread_exception
        if not faulthandler.is_enabled() and sys.stderr is not None:
            with contextlib.suppress(OSError, ValueError, AttributeError):  # a stderr that is no file
                faulthandler.enable()

    def _on_exception(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        sys.__excepthook__(kind, error, trace)
        self.failed(f"{kind.__name__}: {error}", 130 if issubclass(kind, KeyboardInterrupt) else 1)

    def _on_thread_exception(self, caught: threading.ExceptHookArgs) -> None:
        if caught.exc_type is SystemExit:
            return
        name = "a thread" if caught.thread is None else f"thread {caught.thread.name!r}"
        self._write(f"in {name}:\n" + "".join(traceback.format_exception(caught.exc_type, caught.exc_value, caught.exc_traceback)))
        self.failed(f"{caught.exc_type.__name__}: {caught.exc_value} (in {name})", 1)

    def failed(self, why: str, code: int) -> None:
        """This process failed: notify the others and leave with `code`."""
        self._lock.acquire()  # never released: the first thread that comes here ends the process
        _within(_ANNOUNCE_S, lambda: self._announce("failed", why=why.splitlines()[0][:500], code=code))
        self._record("failed", why, code)
        self._leave(code)

    def stuck(self, culprit: int | None, why: str) -> None:
        """The watchdog found a stall: notify the others, print the stack of every thread, leave."""
        self._lock.acquire()
        self._record("stuck", why, STUCK)
        # Process 0, which passes the news on, may be the one that stands still.
        _within(_ANNOUNCE_S / 3, lambda: self._announce("stuck", culprit=culprit, why=why))
        self._write(f"watchdog: {why}\n")
        self.show_threads()
        self._leave(STUCK)

    def peer_failed(self, index: int, why: str, *, show_threads: bool = False) -> None:
        """Another process failed first: one line, and out."""
        self._lock.acquire()
        self._write(f"{self._host} stops: process {index} failed first: {why}\n")
        if show_threads:
            self.show_threads()
        if self._host.index == 0:  # jax aborts processes whose service is gone: process 0 leaves after those that have to speak
            time.sleep(_ANNOUNCE_S)
        self._leave(PEER_FAILED)

    def forced(self) -> None:
        """A second SIGTERM: no agreement, no saving."""
        self._lock.acquire()
        self._write(f"{self._host} was told to stop twice and stops at once, unsaved\n")
        self._leave(143)

    def say(self, text: str) -> None:
        """A line on stderr; nothing ends."""
        self._write(f"{self._host}: {text}\n")

    def show_threads(self) -> None:
        """Write what every thread of this process does to stderr, and beside the job's other files."""
        with contextlib.suppress(OSError, ValueError, AttributeError):
            faulthandler.dump_traceback()
        if self._host.directory is not None:
            with contextlib.suppress(OSError), (self._host.directory / f"threads-{self._host.index}.txt").open("w") as file:
                faulthandler.dump_traceback(file)

    def _record(self, kind: str, why: str, code: int) -> None:
        """For the launcher: who failed and why, with the time, in the job's directory."""
        if self._host.directory is None:
            return
        line: dict[str, Any] = {"process": self._host.index, "kind": kind, "why": why, "code": code, "time": time.time()}
        path = self._host.directory / f"failure-{self._host.attempt}-{self._host.index}.json"
        with contextlib.suppress(OSError):
            write_record(path, json.dumps(line))

    def _write(self, text: str) -> None:
        with contextlib.suppress(OSError, ValueError, AttributeError):
            sys.stderr.write(text)
            sys.stderr.flush()

    def _leave(self, code: int) -> None:
        # Not sys.exit: jax's shutdown would wait for processes that never come, and other threads may be stuck.
        def flush() -> None:
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(OSError, ValueError, AttributeError):
                    stream.flush()

        _within(_ANNOUNCE_S, flush)
        os._exit(code)


def _within(seconds: float, do: Callable[[], None]) -> None:
    """Do it, but do not wait longer than that: what it talks to may be what is broken."""

    def quietly() -> None:
        with contextlib.suppress(RuntimeError, OSError):
            do()

    thread = threading.Thread(target=quietly, daemon=True)
    thread.start()
    thread.join(seconds)
