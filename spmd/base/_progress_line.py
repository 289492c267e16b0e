"""Output of progress reports: a status line in a terminal, lines on stderr elsewhere, and `logging` always.

In a job of several processes only process 0 writes to stderr. The others only log.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from mesh.job import _join
from spmd.base._settings import in_force

_log = logging.getLogger("spmd.progress")


class ProgressLine:
    """The status line in the terminal. Not thread-safe: callers hold a lock."""

    def __init__(self) -> None:
        self._console: Any = None  # not None while the line is shown

    def log(self, what: str, took_s: float) -> None:
        """Report that `what` has been running for `took_s` seconds."""
        self._write(f"{what}, {clock(took_s)}")

    def ended(self, what: str, took_s: float) -> None:
        """Report that `what` has finished after `took_s` seconds."""
        self.clear()
        self._write(f"{what} took {clock(took_s)}")

    def show(self, works: Sequence[tuple[str, float]]) -> None:
        """In a terminal, draw the line for the last of `works` (description, seconds); clear it if there are none."""
        if not works:
            self.clear()
        elif _may_write() and _is_terminal():
            text = "; ".join(f"{what}, {clock(took_s)}" for what, took_s in works[-1:])
            with suppress(OSError, ValueError):  # stderr is closed
                self._draw(text)

    def _draw(self, text: str) -> None:
        # Not `rich.live`: it hides the cursor, which stays hidden if the process is killed, and it redirects `sys.stdout`, which a
        # traced function may read.
        from rich.console import Console
        from rich.text import Text

        if self._console is None:
            self._console = Console(stderr=True)
        line = Text(text, style="dim", no_wrap=True)
        line.truncate(max(self._console.width - 1, 1), overflow="ellipsis")
        self._erase(self._console)
        self._console.print(line, end="", soft_wrap=True)
        self._console.file.flush()

    def clear(self) -> None:
        """Erase the line."""
        console, self._console = self._console, None
        if console is not None:
            with suppress(OSError, ValueError):
                self._erase(console)
                console.file.flush()

    def _erase(self, console: Any) -> None:
        from rich.control import Control
        from rich.segment import ControlType

        console.control(Control(ControlType.CARRIAGE_RETURN, (ControlType.ERASE_IN_LINE, 2)))

    def _write(self, text: str) -> None:
        _log.info("%s", text)
        if _may_write() and not _is_terminal() and not _log.hasHandlers():
            with suppress(OSError, ValueError):
                sys.stderr.write(f"spmd: {text}\n")
                sys.stderr.flush()


def _may_write() -> bool:
    job = _join.job()
    return in_force.progress and sys.stderr is not None and (job is None or job.host.index == 0)


def _is_terminal() -> bool:
    with suppress(OSError, ValueError, AttributeError):
        return sys.stderr.isatty()
    return False


def clock(seconds: float) -> str:
    """Format a duration: 41 s is "0:41", an hour is "1:00:00"."""
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}" if minutes >= 60 else f"{minutes}:{rest:02}"


__all__ = ["ProgressLine", "clock"]
