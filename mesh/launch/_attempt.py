"""One attempt: the gang started, watched until its first bad end, and ended; and which member that was."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mesh.job._place import PEER_FAILED, PREEMPTED, STUCK
from mesh.launch._gang import Exit, Gang
from mesh.launch._output import Output, say

_NOTICE_S = 0.7  # the others hear of a failure within milliseconds, and may say what they were doing
_INTERRUPTED = 130


@dataclass(frozen=True)
class Outcome:
    """How an attempt ended.

    Attributes:
        code: the job's exit code if this was the last attempt.
        first: the end that caused the others; None if all went well or somebody stopped the job.
        why: what the member that failed first said of it, or what its exit code means.
        may_restart: False if somebody asked for the end.
    """

    code: int
    first: Exit | None = None
    why: str = ""
    may_restart: bool = False


class Stops:
    """Signals that ask the launcher to stop, as bytes from a pipe; a second one ends the job at once."""

    def __init__(self) -> None:
        self.reader, writer = os.pipe()
        for descriptor in (self.reader, writer):
            os.set_blocking(descriptor, False)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, _noted)
        self.descriptors = (self.reader, writer)

    def received(self) -> list[int]:
        try:
            return [number for number in os.read(self.reader, 64) if number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
        except BlockingIOError:
            return []


def _noted(number: int, frame: object) -> None:
    """The handler; the byte that `set_wakeup_fd` wrote is what counts."""


def watch(
    gang: Gang, output: Output, stops: Stops, records: tuple[Path, int] | None, hung_up: Callable[[], bool], patience_s: float
) -> Outcome:
    """Follow a gang until it has ended, one way or the other.

    Args:
        records: folder and attempt of what the members write of their own failures; None when members are launchers.
        hung_up: whether who started this launcher has gone away (over SSH); asked when nothing else happens.
        patience_s: how long a signal may hold a member, whatever it does: also while it imports, when it has no watchdog yet.
    """
    held_since: dict[int, float] = {}
    gang.listen(stops.reader)
    asked: list[int] = []
    told = 0
    while gang.running:
        if gang.step(1.0):
            asked += stops.received()
        if hung_up():
            asked.append(signal.SIGHUP)
        if any(number != signal.SIGTERM for number in asked):
            gang.send(signal.SIGINT)
            gang.end(1.0)
            return Outcome(_INTERRUPTED)
        while told < len(asked):
            told += 1
            gang.send(signal.SIGTERM)
        now = time.time()
        held_since = {member: held_since.get(member, now) for member in gang.stopped()}
        for member, since in held_since.items():
            if now - since > patience_s:
                gang.end(0.0)
                why = f"process {member} stopped first: a signal has held it for {now - since:.0f} s"
                return Outcome(STUCK, Exit(member, STUCK, now), why, may_restart=True)
        bad = [end for end in gang.exits if end.code not in (0, PREEMPTED)]
        if bad:
            if asked and all(end.code == -signal.SIGTERM for end in bad):  # told to stop before it had joined: nothing is lost
                gang.end(0.0)
                return Outcome(PREEMPTED)
            return _failed(gang, output, records)
    gang.end(0.0)
    code = PREEMPTED if any(end.code == PREEMPTED for end in gang.exits) else 0
    return Outcome(code)


def _failed(gang: Gang, output: Output, where: tuple[Path, int] | None) -> Outcome:
    """The first bad end is here, or one that follows from it: hear the others out, end them, find out which it was."""
    output.only = {end.member for end in gang.exits if end.code not in (0, PREEMPTED, PEER_FAILED)}
    gang.end(_NOTICE_S)
    records = {} if where is None else _records(*where)
    ends = [end for end in gang.exits if end.code not in (0, PREEMPTED) and end.member not in gang.killed]

    def order(end: Exit) -> tuple[int, float]:
        # A signal comes from outside: it is seen late on a busy machine, when the others have already told what followed from it.
        # SIGABRT is how jax ends a process whose process 0 is gone.
        follows = end.code in (PEER_FAILED, -signal.SIGABRT)
        record = records.get(end.member)
        return 2 if follows else int(end.code > 0), float(record["time"]) if record else end.time

    first = min(ends, key=order)
    record = records.get(first.member)
    if record is None:
        return Outcome(_shell_code(first.code), first, meaning(first.code), may_restart=True)
    return Outcome(int(record["code"]), first, str(record["why"]), may_restart=True)


def report_outcome(outcome: Outcome, output: Output, name: str, began: float, directory: Path) -> None:
    """Print what the process that failed first wrote last, then one line that names it: the other failures followed from it."""
    first = outcome.first
    if first is None:
        return
    words = output.last_words(first.member)
    sys.stderr.write("".join(f"{line}\n" for line in words))
    if outcome.code == STUCK:
        for path in sorted(directory.glob("threads-*.txt")):
            if f"process {path.stem.partition('-')[2]} stopped first" in outcome.why:
                sys.stderr.write(f"threads of process {path.stem.partition('-')[2]}:\n{path.read_text(encoding='utf-8')}")
    did = "ended the job" if outcome.code == STUCK else "failed first"
    say(f"{name} {did}, after {first.time - began:.1f} s: {outcome.why}")


def meaning(code: int) -> str:
    """An exit code in words."""
    if code < 0:
        known = {s.value: s.name for s in signal.Signals}
        also = ": out of memory, or somebody killed it" if code == -signal.SIGKILL else ""
        return f"killed by {known.get(-code, f'signal {-code}')}{also}"
    return f"exit code {code}"


def _records(directory: Path, attempt: int) -> dict[int, dict[str, Any]]:
    """What the members themselves wrote about their failure, by number (see `mesh/job/_alarm.py`)."""
    found: dict[int, dict[str, Any]] = {}
    for path in directory.glob(f"failure-{attempt}-*.json"):
        try:
            record = json.loads(path.read_text(encoding="utf-8"))
            found[int(record["process"])] = record
        except (ValueError, KeyError, OSError):  # killed while it wrote
            continue
    return found


def _shell_code(code: int) -> int:
    return 128 - code if code < 0 else code
