"""What the members write: shown line by line with host and number before it, kept in files, and shown again at the end
for the one member that failed first."""

from __future__ import annotations

import re
import sys
from collections import deque
from pathlib import Path
from typing import TextIO

_KEPT_LINES = 400
# gloo says so for every group of processes it connects; nobody asked
_NOISE = "peer ranks. Expected number of connected peer ranks is"
_LOG_LINE = re.compile(r"[IWEF]\d{4} \d\d:")  # XLA's own log
_TRACEBACK = "Traceback (most recent call last):"


class Output:
    """The members' lines of one attempt.

    Args:
        names: a member's name, e.g. "node1 3".
        directory: where the full text of each member goes.
        attempt: number in the files' names.
        has_names: the members' lines begin with names already (those of the launchers on other hosts).
    """

    def __init__(self, names: dict[int, str], directory: Path, attempt: int, has_names: bool) -> None:
        width = max(map(len, names.values()), default=0)
        self._prefix = {member: "" if has_names else f"[{name:<{width}}] " for member, name in names.items()}
        self._files: dict[int, TextIO] = {
            member: (directory / f"output-{attempt}-{name.replace(' ', '-')}.log").open("w", encoding="utf-8", buffering=1)
            for member, name in names.items()
        }
        self._tails: dict[int, deque[str]] = {member: deque(maxlen=_KEPT_LINES) for member in names}
        self.only: set[int] | None = None

    def line(self, member: int, is_error: bool, text: str) -> None:
        """Take a line in. Once a member has failed (`only`), the others' lines go to their files alone: they follow from it."""
        if _NOISE in text:
            return
        self._files[member].write(text + "\n")
        if is_error:
            self._tails[member].append(text)
        if self.only is None or member in self.only:
            stream = sys.stderr if is_error else sys.stdout
            stream.write(f"{self._prefix[member]}{text}\n")
            stream.flush()

    def last_words(self, member: int) -> list[str]:
        """The member's last traceback, or its last lines on stderr if it wrote none."""
        lines = list(self._tails[member])
        starts = [i for i, line in enumerate(lines) if line.endswith(_TRACEBACK)]
        if not starts:
            return lines[-12:]
        traceback = lines[starts[-1] :]
        ends = [i for i, line in enumerate(traceback) if _LOG_LINE.match(line)]
        return traceback[: ends[0]] if ends else traceback

    def close(self) -> None:
        for file in self._files.values():
            file.close()


def say(text: str) -> None:
    """A line of the launcher's own, on stderr."""
    sys.stderr.write("".join(f"spmd launch: {line}\n" for line in text.splitlines()))
    sys.stderr.flush()
