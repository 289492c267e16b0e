"""Output of the members: printed line by line with host and number as prefix, and written to files. The last error of the member
that failed first is printed again at the end."""

from __future__ import annotations

import re
import sys
from collections import deque
from pathlib import Path
from typing import TextIO

_KEPT_LINES = 400
# gloo logs this for every group of processes that it connects
_NOISE = "peer ranks. Expected number of connected peer ranks is"
_LOG_LINE = re.compile(r"[IWEF]\d{4} \d\d:")  # XLA's own log
_TRACEBACK = "Traceback (most recent call last):"


class Output:
    """Prints and stores the lines that members write in one attempt.

    Args:
        names: name of each member, e.g. "node1 3".
        directory: folder for a file with the full output of each member.
        attempt: number of the attempt, for the files' names.
        has_names: whether the members' lines already begin with names, because the members are launchers on other hosts.
    """

    def __init__(self, names: dict[int, str], directory: Path, attempt: int, has_names: bool) -> None:
        width = max(map(len, names.values()), default=0)
        self._prefix = {member: "" if has_names else f"[{name:<{width}}] " for member, name in names.items()}
        self._files: dict[int, TextIO] = {
            member: (directory / f"output-{attempt}-{name.replace(' ', '-')}.log").open("w", encoding="utf-8", buffering=1)
            for member, name in names.items()
        }
        self._tails: dict[int, deque[str]] = {member: deque(maxlen=_KEPT_LINES) for member in names}
        self.only: set[int] | None = None  # members whose lines are still printed; None: all

    def line(self, member: int, is_error: bool, text: str) -> None:
        """Handle a line of a member. After a failure, lines of members outside `only` go to their files alone, as consequences of it."""
        if _NOISE in text:
            return
        self._files[member].write(text + "\n")
        if is_error:
            self._tails[member].append(text)
        if self.only is None or member in self.only:
            stream = sys.stderr if is_error else sys.stdout
            stream.write(f"{self._prefix[member]}{text}\n")
            stream.flush()

    def last_error(self, member: int) -> list[str]:
        """The member's last traceback, or its last lines on stderr if it wrote none."""
        lines = list(self._tails[member])
        starts = [i for i, line in enumerate(lines) if line.endswith(_TRACEBACK)]
        if not starts:
            return lines[-12:]
        traceback = lines[starts[-1] :]
        ends = [i for i, line in enumerate(traceback) if _LOG_LINE.match(line)]
        return traceback[: ends[0]] if ends else traceback

    def close(self) -> None:
        """Close the files."""
        for file in self._files.values():
            file.close()


def log(text: str) -> None:
    """Write a message of the launcher itself to stderr."""
    sys.stderr.write("".join(f"spmd launch: {line}\n" for line in text.splitlines()))
    sys.stderr.flush()
