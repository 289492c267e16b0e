"""A peer seen from the run: a process that is asked by JSON lines."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from spmd.base._errors import SpmdError, message

_SCRIPT = Path(__file__).with_name("_peer.py")
_TAIL_LINES = 6


class PeerError(SpmdError):
    """A peer could not do what it was asked."""


class PeerProcess:
    """`_peer.py <file>` in a process of its own.

    Args:
        name: as tables show it.
        file: the contender's file in `peers/`, without `.py`.
        python: the interpreter of its environment.
    """

    def __init__(self, name: str, file: str, python: str = sys.executable) -> None:
        self.name = name
        self._errors = tempfile.TemporaryFile("w+", encoding="utf-8")  # noqa: SIM115  (closed by `stop`)
        self._process = subprocess.Popen(
            [python, str(_SCRIPT), file], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, text=True, encoding="utf-8"
        )

    def ask(self, do: str, **arguments: Any) -> dict[str, Any]:
        """Send a command and wait for its answer.

        Raises:
            PeerError: the peer raised or died; the message holds what it said last.
        """
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        said: dict[str, Any] = json.loads(line) if line else {"error": f"the process ended with code {self._process.wait()}"}
        if "error" in said:
            raise PeerError(message(f"peer {self.name!r} failed at {do!r}: {said['error']}", *self._tail(), fix="see the lines above"))
        return said["answer"]

    def stop(self) -> None:
        """End the process, politely where it still listens."""
        if self._process.poll() is None:
            try:
                self.ask("stop")
            except PeerError:
                self._process.kill()
        for pipe in (self._process.stdin, self._process.stdout, self._errors):
            if pipe is not None:
                pipe.close()
        self._process.wait()

    def _tail(self) -> list[str]:
        self._errors.seek(0)
        return [line.rstrip() for line in self._errors.readlines() if line.strip()][-_TAIL_LINES:]
