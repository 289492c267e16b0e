"""The keeper: a small process that outlives the launcher by a moment, and ends what the launcher cannot end any more.

The processes of a job die with the launcher by themselves; what *they* started (data loaders, compilers) may not. The
keeper knows their process groups and kills them when its pipe from the launcher closes, for whatever reason.
"""

from __future__ import annotations

import contextlib
import os
import signal


class Keeper:
    """The launcher's end of the pipe."""

    def __init__(self) -> None:
        reader, self._writer = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(self._writer)
            _keep(reader)
        os.close(reader)

    @property
    def descriptors(self) -> tuple[int, ...]:
        """What a fork of the launcher must close, so that the pipe ends with the launcher."""
        return (self._writer,)

    def watch(self, group: int) -> None:
        """Kill this process group when the launcher is gone."""
        os.write(self._writer, f"{group}\n".encode())

    def release(self) -> None:
        """The launcher ends as it should: the keeper kills what is left of the groups, and ends."""
        os.close(self._writer)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self.pid, 0)


def kill_group(group: int, number: int = signal.SIGKILL) -> None:
    """Send a signal to a process group; nothing happens if it is gone."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


def _keep(reader: int) -> None:
    # Of a forked launcher only this function runs on; nothing of the launcher's is unwound.
    try:
        os.setsid()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        signal.set_wakeup_fd(-1)
        null = os.open(os.devnull, os.O_RDWR)
        for target in (0, 1, 2):
            os.dup2(null, target)
        told = b""
        while piece := os.read(reader, 4096):
            told += piece
        for group in told.split():
            kill_group(int(group))
    finally:
        os._exit(0)
