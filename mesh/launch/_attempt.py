"""One attempt: waits for the end of a gang, ends it after the first failure, and finds out which member failed first."""

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
from mesh.launch._output import Output, log

_NOTICE_S = 0.7  # the other processes are notified of a failure within milliseconds, and may print their stacks
_INTERRUPTED = 130


@dataclass(frozen=True)
class Outcome:
    """How an attempt ended.

    Attributes:
        code: the job's exit code if this was the last attempt.
        first: exit of the member that failed first; None if the job succeeded or was stopped on request.
        why: the reason that this member reported, or the meaning of its exit code.
        may_restart: whether the job may be restarted; False if it was stopped on request.
    """

    code: int
    first: Exit | None = None
    why: str = ""
    may_restart: bool = False


class Stops:
    """Receives SIGINT, SIGTERM and SIGHUP of the launcher through a pipe, on which a selector can wait."""

    def __init__(self) -> None:
        self.reader, writer = os.pipe()
        for descriptor in (self.reader, writer):
            os.set_blocking(descriptor, False)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, _no_action)
        self.descriptors = (self.reader, writer)

    def received(self) -> list[int]:
        """The signals received since the last call."""
        try:
            return [number for number in os.read(self.reader, 64) if number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
        except BlockingIOError:
            return []


def _no_action(number: int, frame: object) -> None:
    """Python's handler. The byte that `set_wakeup_fd` writes to the pipe has the signal's number."""


def watch(
    gang: Gang, output: Output, stops: Stops, records: tuple[Path, int] | None, is_disconnected: Callable[[], bool], stopped_limit_s: float
) -> Outcome:
    """Wait until a gang has ended, and pass on signals to it. After the first failure, end the other members.

    Args:
        gang: the running processes.
        output: receives the lines that they print.
        stops: the signals that the launcher receives.
        records: folder and attempt of the failure records that members write; None if members are launchers on other hosts.
        is_disconnected: whether the launcher that started this one over SSH is gone. Called at least once a second.
        stopped_limit_s: seconds that a member may be stopped by a signal. Needed while it imports and has no watchdog yet.
    """
    stopped_since: dict[int, float] = {}
    gang.listen(stops.reader)
    requests: list[int] = []
    num_forwarded = 0
    while gang.running:
        if gang.step(1.0):
            requests += stops.received()
        if is_disconnected():
            requests.append(signal.SIGHUP)
        if any(number != signal.SIGTERM for number in requests):
            gang.send(signal.SIGINT)
            gang.end(1.0)
            return Outcome(_INTERRUPTED)
        while num_forwarded < len(requests):
            num_forwarded += 1
            gang.send(signal.SIGTERM)
        now = time.time()
        stopped_since = {member: stopped_since.get(member, now) for member in gang.stopped()}
        for member, since in stopped_since.items():
            if now - since > stopped_limit_s:
                gang.end(0.0)
                why = f"process {member} stopped first: it has been stopped by a signal for {now - since:.0f} s"
                return Outcome(STUCK, Exit(member, STUCK, now), why, may_restart=True)
        failures = [end for end in gang.exits if end.code not in (0, PREEMPTED)]
        if failures:
            # SIGTERM ended a member before it had joined the job and could handle the signal: nothing is lost.
            if requests and all(end.code == -signal.SIGTERM for end in failures):
                gang.end(0.0)
                return Outcome(PREEMPTED)
            return _failed(gang, output, records)
    gang.end(0.0)
    code = PREEMPTED if any(end.code == PREEMPTED for end in gang.exits) else 0
    return Outcome(code)


def _failed(gang: Gang, output: Output, where: tuple[Path, int] | None) -> Outcome:
    """End the gang after a failure, and find the member that failed first: the exit seen first may be a consequence of another."""
    output.only = {end.member for end in gang.exits if end.code not in (0, PREEMPTED, PEER_FAILED)}
    gang.end(_NOTICE_S)
    records = {} if where is None else _records(*where)
    ends = [end for end in gang.exits if end.code not in (0, PREEMPTED) and end.member not in gang.killed]

    def order(end: Exit) -> tuple[int, float]:
        # Death by a signal has an outside cause, and precedes the errors of the others, even if a busy machine sees it after them.
        # jax ends a process with SIGABRT when process 0 is gone.
        is_consequence = end.code in (PEER_FAILED, -signal.SIGABRT)
        record = records.get(end.member)
        return 2 if is_consequence else int(end.code > 0), float(record["time"]) if record else end.time

    first = min(ends, key=order)
    record = records.get(first.member)
    if record is None:
        return Outcome(_shell_code(first.code), first, meaning(first.code), may_restart=True)
    return Outcome(int(record["code"]), first, str(record["why"]), may_restart=True)


def report_outcome(outcome: Outcome, output: Output, name: str, began: float, directory: Path) -> None:
    """Print the last traceback or lines of the process that failed first, then one line that names it and the reason."""
    first = outcome.first
    if first is None:
        return
    lines = output.last_error(first.member)
    sys.stderr.write("".join(f"{line}\n" for line in lines))
    if outcome.code == STUCK:
        for path in sorted(directory.glob("threads-*.txt")):
            if f"process {path.stem.partition('-')[2]} stopped first" in outcome.why:
                sys.stderr.write(f"threads of process {path.stem.partition('-')[2]}:\n{path.read_text(encoding='utf-8')}")
    action = "ended the job" if outcome.code == STUCK else "failed first"
    log(f"{name} {action}, after {first.time - began:.1f} s: {outcome.why}")


def meaning(code: int) -> str:
    """Description of an exit code; a negative one is a signal's number."""
    if code < 0:
        known = {s.value: s.name for s in signal.Signals}
        also = ": out of memory, or killed from outside" if code == -signal.SIGKILL else ""
        return f"killed by {known.get(-code, f'signal {-code}')}{also}"
    return f"exit code {code}"


def _records(directory: Path, attempt: int) -> dict[int, dict[str, Any]]:
    """The failure records that members wrote, by member (see `mesh/job/_alarm.py`)."""
    found: dict[int, dict[str, Any]] = {}
    for path in directory.glob(f"failure-{attempt}-*.json"):
        try:
            record = json.loads(path.read_text(encoding="utf-8"))
            found[int(record["process"])] = record
        except (ValueError, KeyError, OSError):  # the member was killed while writing
            continue
    return found


def _shell_code(code: int) -> int:
    """Exit code as a shell reports it: 128 plus the number of a signal."""
    return 128 - code if code < 0 else code
