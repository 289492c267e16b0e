"""A worker process that answers one JSON line per request: what crashes or hangs costs one answer, not the run."""

from __future__ import annotations

import json
import queue
import subprocess
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
START_TIMEOUT_S = 180.0


class Worker:
    """A process and the queue of lines that it wrote.

    Attributes:
        hello: the JSON of its first line, which says that it is ready.
    """

    def __init__(self, command: Sequence[str], env: Mapping[str, str] | None = None) -> None:
        """`env`: the whole environment; None: this process's."""
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, cwd=ROOT, env=env
        )
        self._lines: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()
        first = self._next(START_TIMEOUT_S)
        if first is None:
            raise SystemExit(f"the worker did not start (exit code {self.process.poll()}); try: {' '.join(command)}")
        self.hello: Any = json.loads(first)

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(line)
        self._lines.put(None)

    def _next(self, timeout_s: float) -> str | None:
        try:
            return self._lines.get(timeout=timeout_s)
        except queue.Empty:
            return None

    def ask(self, request: dict[str, Any], timeout_s: float) -> dict[str, Any] | str:
        """The answer, or why there is none."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        line = self._next(timeout_s)
        if line is not None:
            return json.loads(line)
        code = self.process.poll()
        return f"timed out after {timeout_s:.0f} s" if code is None else f"the process died with exit code {code}"

    def stop(self) -> None:
        """End the process."""
        self.process.kill()
        self.process.wait()
