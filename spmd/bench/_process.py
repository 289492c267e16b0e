"""A contender's process as the benchmark run controls it: commands and answers are JSON lines."""

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
    """A peer failed to execute a command."""


class PeerProcess:
    """Runs `_peer.py <file>` in its own process.

    Args:
        name: the contender's name in tables.
        file: its file in `peers/`, without `.py`.
        python: its Python interpreter.
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
            PeerError: the peer raised or died. The message contains its last lines of output.
        """
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        reply: dict[str, Any] = json.loads(line) if line else {"error": f"the process exited with code {self._process.wait()}"}
        if "error" in reply:
            raise PeerError(message(f"peer {self.name!r} failed at {do!r}: {reply['error']}", *self._tail(), fix="see the lines above"))
        return reply["answer"]

    def stop(self) -> None:
        """Stop the process: by the command "stop", or by killing it if that fails."""
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
