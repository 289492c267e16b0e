"""Alarm: ends this process after a failure that must end the whole job. Each failure is reported once, in one line, without blocking.

After an exception in one process the others wait in a collective that never completes, and jax's own shutdown waits minutes
for them. So the first failure is announced to all processes. Each writes one line and exits at once with its exit code.
This module does not depend on jax; the caller passes the function that announces a failure.
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
    """Reports a failure to the other processes and to the launcher, and ends this process.

    Args:
        host: this process's place in the job.
        announce: called with the kind of the failure and keyword arguments, to notify the other processes. It may fail or
            block; it gets at most `_ANNOUNCE_S` seconds.
    """

    def __init__(self, host: Host, announce: Callable[..., None]) -> None:
        self._host, self._announce = host, announce
        self._lock = threading.Lock()

    def install(self) -> None:
        """Install exception hooks, so that an uncaught exception in any thread ends the job. A crash prints the stack of every thread."""
        sys.excepthook = self._on_exception
        threading.excepthook = self._on_thread_exception
        if not faulthandler.is_enabled() and sys.stderr is not None:
            with contextlib.suppress(OSError, ValueError, AttributeError):  # stderr is not a file
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
        """Handle a failure of this process: notify the others and exit with `code`."""
        self._lock.acquire()  # never released: the first thread that takes it ends the process
        _within(_ANNOUNCE_S, lambda: self._announce("failed", why=why.splitlines()[0][:500], code=code))
        self._record("failed", why, code)
        self._leave(code)

    def stuck(self, culprit: int | None, why: str) -> None:
        """Handle a hang that the watchdog detected: notify the others, print the stack of every thread, and exit."""
        self._lock.acquire()
        self._record("stuck", why, STUCK)
        # Notices go through process 0, which may be the process that hangs.
        _within(_ANNOUNCE_S / 3, lambda: self._announce("stuck", culprit=culprit, why=why))
        self._write(f"watchdog: {why}\n")
        self.show_threads()
        self._leave(STUCK)

    def peer_failed(self, index: int, why: str, *, show_threads: bool = False) -> None:
        """Handle the failure of another process: write one line and exit."""
        self._lock.acquire()
        self._write(f"{self._host} exits because process {index} failed first: {why}\n")
        if show_threads:
            self.show_threads()
        if self._host.index == 0:  # jax aborts a process whose service is gone, so process 0 exits after the others have written
            time.sleep(_ANNOUNCE_S)
        self._leave(PEER_FAILED)

    def forced(self) -> None:
        """Handle a second SIGTERM: exit at once, without agreeing on a step or saving."""
        self._lock.acquire()
        self._write(f"{self._host} received SIGTERM twice and exits at once, without saving\n")
        self._leave(143)

    def log(self, text: str) -> None:
        """Write a line to stderr, without ending the process."""
        self._write(f"{self._host}: {text}\n")

    def show_threads(self) -> None:
        """Write the stack of every thread to stderr, and to a file in the job's directory."""
        with contextlib.suppress(OSError, ValueError, AttributeError):
            faulthandler.dump_traceback()
        if self._host.directory is not None:
            with contextlib.suppress(OSError), (self._host.directory / f"threads-{self._host.index}.txt").open("w") as file:
                faulthandler.dump_traceback(file)

    def _record(self, kind: str, why: str, code: int) -> None:
        """Write the failure, its reason and its time to the job's directory, where the launcher reads them."""
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
        # Not sys.exit: jax's shutdown would wait for processes that never arrive, and other threads may hang.
        def flush() -> None:
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(OSError, ValueError, AttributeError):
                    stream.flush()

        _within(_ANNOUNCE_S, flush)
        os._exit(code)


def _within(seconds: float, action: Callable[[], None]) -> None:
    """Run `action` on a thread and wait at most `seconds` for it, since it may need the process or link that is broken."""

    def run() -> None:
        with contextlib.suppress(RuntimeError, OSError):
            action()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
