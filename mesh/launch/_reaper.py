"""The reaper: a small process that kills the process groups of a job when the launcher is gone.

The processes of a job die with the launcher by themselves, but *their* child processes (data loaders, compilers) may not. The
reaper receives the process groups through a pipe, and kills them when the launcher's end closes for any reason.
"""

from __future__ import annotations

import contextlib
import os
import signal


class Reaper:
    """Starts the reaper process, and sends it process groups through a pipe."""

    def __init__(self) -> None:
        reader, self._writer = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(self._writer)
            _run(reader)
        os.close(reader)

    @property
    def descriptors(self) -> tuple[int, ...]:
        """Descriptors that a fork of the launcher must close, so that the pipe closes when the launcher ends."""
        return (self._writer,)

    def watch(self, group: int) -> None:
        """Kill this process group when the launcher is gone."""
        os.write(self._writer, f"{group}\n".encode())

    def release(self) -> None:
        """Close the pipe at the normal end of the launcher, and wait until the reaper has killed the groups and ended."""
        os.close(self._writer)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self.pid, 0)


def kill_group(group: int, number: int = signal.SIGKILL) -> None:
    """Send a signal to a process group, if it still exists."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


def _run(reader: int) -> None:
    """Run the reaper in the forked process, and exit without unwinding the launcher's frames."""
    try:
        os.setsid()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        signal.set_wakeup_fd(-1)
        null = os.open(os.devnull, os.O_RDWR)
        for target in (0, 1, 2):
            os.dup2(null, target)
        received = b""
        while piece := os.read(reader, 4096):
            received += piece
        for group in received.split():
            kill_group(int(group))
    finally:
        os._exit(0)
