"""A worker process that answers one JSON line per request: what crashes or hangs costs one answer, not the run."""

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
    """The options that every sweep over `what` has: which of them, how long one may take, and where the results go."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(f"--{what}", default="", metavar="REGEX", help="only those in whose name the pattern is found")
    parser.add_argument("--shard", default=WHOLE, metavar="I/N", help="every N-th of them, starting with the I-th")
    parser.add_argument("--timeout", type=float, default=timeout_s, metavar="S", help="seconds for each")
    parser.add_argument("--json", type=Path, default=None, metavar="OUT", help=f"default: {results} for a whole run, else nowhere")
    parser.add_argument("--merge", type=Path, nargs="*", default=[], metavar="JSON", help="run nothing: put these shards' results together")
    parser.add_argument("--accept", action="store_true", help="write the record although something that passed in it does not any more")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    return parser


def merged(shards: Sequence[Path]) -> dict[str, Any]:
    """The results of several runs: what is deeper than a name comes from every one, the last one's where they differ."""
    found: dict[str, Any] = {}
    for path in shards:
        _put_in(found, json.loads(path.read_text(encoding="utf-8")))
    return found


def _put_in(old: dict[str, Any], new: dict[str, Any]) -> None:
    for name, value in new.items():
        if isinstance(value, dict) and isinstance(old.get(name), dict):
            _put_in(old[name], value)
        else:
            old[name] = value


def shard_of(names: Sequence[T], shard: str) -> list[T]:
    """The shard "I/N": every N-th, starting with the I-th."""
    first, step = map(int, shard.split("/"))
    return list(names[first::step])


class _NoAnswerError(Exception):
    """The process did not answer; the message says why."""


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
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        try:
            self.hello: Any = self._next(START_TIMEOUT_S)
        except _NoAnswerError as error:
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
            raise _NoAnswerError(f"timed out after {timeout_s:.0f} s") from None
        if line is None:
            raise _NoAnswerError(f"the process died with exit code {self.process.wait()}")
        return json.loads(line)

    def ask(self, request: dict[str, Any], timeout_s: float) -> dict[str, Any] | str:
        """The answer, or why there is none."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it died after its last answer: there is none to this one
            self.process.stdin.write(json.dumps(request) + "\n")
            self.process.stdin.flush()
        try:
            return self._next(timeout_s)
        except _NoAnswerError as error:
            return str(error)

    def stop(self) -> None:
        """End the process, and close its pipes: a sweep starts a hundred workers."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.kill()
        self.process.wait()
        self._reader.join()
        self.process.stdout.close()
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()


def serve(answer_to: Callable[[dict[str, Any]], Any], hello: Any = "ready", forget_every: int = 1) -> None:
    """What the process does: an answer to each line of standard input, until that ends; what is printed meanwhile goes to stderr.

    Args:
        hello: the first line, which says that it is ready.
        forget_every: after so many answers jax forgets its programs.
    """
    import jax

    answers, sys.stdout = sys.stdout, sys.stderr

    def say(value: Any) -> None:
        answers.write(json.dumps(value) + "\n")
        answers.flush()

    say(hello)
    for number, line in enumerate(sys.stdin, 1):
        say(answer_to(json.loads(line)))
        if number % forget_every == 0:
            jax.clear_caches()
