"""A worker process that replies to each request with one JSON line, so that a crash or a hang loses one reply and not the run."""

from __future__ import annotations

import argparse
import contextlib
import json
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

ROOT = Path(__file__).resolve().parents[1]
START_TIMEOUT_S = 180.0
WHOLE = "0/1"
T = TypeVar("T")


def sweep_parser(what: str, description: str | None, timeout_s: float, results: Path) -> argparse.ArgumentParser:
    """The options that all sweeps share: which `what` to run, the timeout of one, and the file for the results."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(f"--{what}", default="", metavar="REGEX", help="only those whose name matches")
    parser.add_argument("--shard", default=WHOLE, metavar="I/N", help="every N-th of them, starting with the I-th, counted from 0")
    parser.add_argument("--timeout", type=float, default=timeout_s, metavar="S", help="timeout of each, in seconds")
    parser.add_argument(
        "--json",
        type=Path,
        default=None,
        metavar="OUT",
        help=f"file for the results; default: {results} for a complete run, otherwise none",
    )
    parser.add_argument("--merge", type=Path, nargs="*", default=[], metavar="JSON", help="run nothing; merge the results of these shards")
    parser.add_argument("--accept", action="store_true", help="write the record even if some of its entries no longer pass")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    return parser


def merged(shards: Sequence[Path]) -> dict[str, Any]:
    """The merged results of several runs. Nested dicts are merged; for other values the last run counts."""
    found: dict[str, Any] = {}
    for path in shards:
        _merge(found, json.loads(path.read_text(encoding="utf-8")))
    return found


def _merge(old: dict[str, Any], new: dict[str, Any]) -> None:
    for name, value in new.items():
        if isinstance(value, dict) and isinstance(old.get(name), dict):
            _merge(old[name], value)
        else:
            old[name] = value


def shard_of(names: Sequence[T], shard: str) -> list[T]:
    """The shard "I/N": every N-th name, starting with the I-th, counted from 0."""
    first, step = map(int, shard.split("/"))
    return list(names[first::step])


class _NoReplyError(Exception):
    """The process did not reply. The message is the reason."""


class Worker:
    """A worker process and the queue of its output lines.

    Attributes:
        hello: the JSON value of its first line, which it writes when it is ready.
    """

    def __init__(self, command: Sequence[str], env: Mapping[str, str] | None = None) -> None:
        """`env`: the complete environment; None inherits that of this process."""
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, cwd=ROOT, env=env
        )
        self._lines: queue.Queue[str | None] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        try:
            self.hello: Any = self._next(START_TIMEOUT_S)
        except _NoReplyError as error:
            raise SystemExit(f"the worker did not start: {error}; try: {' '.join(command)}") from error

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(line)
        self._lines.put(None)

    def _next(self, timeout_s: float) -> Any:
        try:
            line = self._lines.get(timeout=timeout_s)
        except queue.Empty:
            raise _NoReplyError(f"timed out after {timeout_s:.0f} s") from None
        if line is None:
            raise _NoReplyError(f"the process died with exit code {self.process.wait()}")
        return json.loads(line)

    def ask(self, request: dict[str, Any], timeout_s: float) -> dict[str, Any] | str:
        """Send a request. Returns the reply, or as a string the reason why there is none."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # the process has died; `_next` returns the reason
            self.process.stdin.write(json.dumps(request) + "\n")
            self.process.stdin.flush()
        try:
            return self._next(timeout_s)
        except _NoReplyError as error:
            return str(error)

    def stop(self) -> None:
        """Kill the process and close its pipes, because a sweep starts a hundred workers."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.kill()
        self.process.wait()
        self._reader.join()
        self.process.stdout.close()
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()


def serve(answer_to: Callable[[dict[str, Any]], Any], hello: Any = "ready", forget_every: int = 1) -> None:
    """Run in the worker: reply to each line of standard input until it ends. Other output goes to stderr.

    Args:
        answer_to: computes the reply to a request.
        hello: the first line, which means that the worker is ready.
        forget_every: number of replies after which jax's caches are cleared.
    """
    import jax

    answers, sys.stdout = sys.stdout, sys.stderr

    def reply(value: Any) -> None:
        answers.write(json.dumps(value) + "\n")
        answers.flush()

    reply(hello)
    for number, line in enumerate(sys.stdin, 1):
        reply(answer_to(json.loads(line)))
        if number % forget_every == 0:
            jax.clear_caches()
