"""Interrupted saves: processes that are killed during a save, and disks that become full, read-only, slow or vanish.

    python benchmarks/interrupted.py                         # every case once, about 200
    python benchmarks/interrupted.py --cases 24 --json /tmp/interrupted.json

A case is a job of one or two processes. It saves step 1, acknowledges it, and saves step 2 while a fault is injected. Then a new
process restores, and must find the last acknowledged step or a later one, bit for bit. Jobs are forked from this process, which
imports jax but never initializes it, so a case takes tenths of a second. The two processes of a job communicate through pipes. Results
are written to benchmarks/results/interrupted.json, and a table is printed.
"""

from __future__ import annotations

import errno
import itertools
import json
import multiprocessing
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import rich
import rich.table
import tyro

import spmd.checkpoint as checkpoint
from spmd.base._errors import CheckpointError
from spmd.checkpoint import _direct, _files

ROOT = Path(__file__).resolve().parents[1]
POINTS = 12
WAIT_S = 30.0


@dataclass(frozen=True)
class Options:
    """Options of the run."""

    cases: int = 0
    """Maximum number of cases, chosen evenly; 0 runs all."""
    json: Path = ROOT / "benchmarks" / "results" / "interrupted.json"
    """File for the results."""


@dataclass(frozen=True)
class Case:
    """One interrupted save.

    Attributes:
        what: the fault: "kill", or "full", "read-only", "slow" or "vanished" for the disk.
        point: position of the fault among the events of the save, in twelfths.
        victims: indices of the processes with the fault.
        size: number of processes of the job.
        wait: whether the save is synchronous.
    """

    what: str
    point: int
    victims: tuple[int, ...]
    size: int
    wait: bool


class PipeGang:
    """Two processes connected by a pipe. A dead peer raises a CheckpointError, as with the coordination service."""

    def __init__(self, index: int, size: int, pipe: Connection | None) -> None:
        self.index, self.size, self._pipe = index, size, pipe

    def exchange(self, name: str, text: str) -> list[str]:
        if self._pipe is None:
            return [text]
        try:
            self._pipe.send(text)
            if not self._pipe.poll(WAIT_S):
                raise CheckpointError(f"process {1 - self.index} did not arrive at '{name}'")
            other = self._pipe.recv()
        except (EOFError, OSError) as error:
            raise CheckpointError(f"process {1 - self.index} did not arrive at '{name}'") from error
        return [text, other] if self.index == 0 else [other, text]


def state(index: int, size: int, step: int) -> dict[str, Any]:
    """State that differs from step to step and is identical in all processes, as unsharded state is."""
    rng = np.random.default_rng(step)
    return {"big": rng.standard_normal((600, 1000)).astype(np.float32), "small": rng.integers(0, 100, 7), "step": step, "name": "run"}


@dataclass
class Trigger:
    """Counts the disk operations of a save, and injects a fault at one of these events."""

    at: int
    act: Callable[[], None]
    count: int = 0
    names: list[str] = field(default_factory=list[str])

    def event(self, name: str) -> None:
        self.count += 1
        self.names.append(name)
        if self.count == self.at:
            self.act()

    def install(self) -> None:
        """Wrap every function that accesses the disk with an event before and after it. A write also has an event in the middle."""
        for name in ("make_folder", "write_small", "read_small", "sync_folder", "commit", "retire"):
            setattr(_files, name, self._around(getattr(_files, name), name))
        write = _direct.write

        def half(descriptor: int, parts: Sequence[memoryview]) -> list[int]:
            self.event("before write")
            middle = len(parts) // 2
            checksums = write(descriptor, parts[:middle])
            self.event("in write")
            checksums += write(descriptor, parts[middle:])
            self.event("after write")
            return checksums

        _direct.write = half

    def _around(self, function: Callable[..., Any], name: str) -> Callable[..., Any]:
        def wrapped(*args: Any) -> Any:
            self.event(f"before {name}")
            result = function(*args)
            self.event(f"after {name}")
            return result

        return wrapped


def job(case: Case, index: int, root: Path, pipes: Sequence[Connection | None], reports: Sequence[Sequence[Connection]], at: int) -> None:
    """Run one process of a case: save step 1 and acknowledge it, save step 2 with the fault, then step 3 if the process is alive."""
    for other in range(case.size):  # a pipe reports the death of a process only if no other process has its end open
        for pipe in (reports[other][0], *((pipes[other], reports[other][1]) if other != index else ())):
            if pipe is not None:
                pipe.close()
    report = reports[index][1]
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # with a "full" disk, a write raises an error instead of a signal
    gang = PipeGang(index, case.size, pipes[index])
    checkpoint.save(root, 1, state(index, case.size, 1), wait=True, gang=gang, keep=2)
    report.send(("acknowledged", 1))
    trigger = Trigger(at if index in case.victims else 0, lambda: fault(case.what, root))
    trigger.install()
    for step in (2, 3):
        try:
            saving = checkpoint.save(root, step, state(index, case.size, step), wait=case.wait, gang=gang, keep=2)
            saving.join()
            report.send(("acknowledged", step))
        except CheckpointError as error:
            report.send(("error", str(error)))
            if case.what != "slow":
                break
        if step == 2:
            report.send(("events", trigger.count))
            trigger.at = 0
    os._exit(0)


def fault(what: str, root: Path) -> None:
    """Inject the fault."""
    if what == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif what == "full":  # further writes fail, as on a full disk
        resource.setrlimit(resource.RLIMIT_FSIZE, (64, 64))
    elif what == "read-only":
        if subprocess.run(["mount", "-o", "remount,ro", str(root.parent)], stderr=subprocess.DEVNULL, check=False).returncode:
            raise OSError(errno.EROFS, "the disk cannot be remounted while a file is open; only the error is simulated")
    elif what == "slow":
        time.sleep(0.5)
    elif what == "vanished":
        shutil.rmtree(root)


def run(case: Case, folder: Path, at: int) -> dict[str, Any]:
    """Run a case, restore in a new process, and return the outcome."""
    root = folder / "run"
    context = multiprocessing.get_context("fork")
    pipes: tuple[Any, Any] = context.Pipe() if case.size == 2 else (None, None)
    reports = [context.Pipe() for _ in range(case.size)]
    processes = [context.Process(target=job, args=(case, i, root, pipes, reports, at)) for i in range(case.size)]
    for process in processes:
        process.start()
    for pipe in (*pipes, *(theirs for _, theirs in reports)):
        if pipe is not None:
            pipe.close()
    received = [list(_received(ours, process)) for (ours, _), process in zip(reports, processes, strict=True)]
    acknowledged = max((value for one in received for kind, value in one if kind == "acknowledged"), default=0)
    errors = [value for one in received for kind, value in one if kind == "error"]
    events = next((value for one in received for kind, value in one if kind == "events"), 0)
    if case.what == "read-only":
        subprocess.run(["mount", "-o", "remount,rw", str(folder)], check=True)
    found = forked(lambda: restored(root))
    return {"acknowledged": acknowledged, "errors": errors, "events": events, "restored": found}


def _received(report: Connection, process: Any) -> Iterator[tuple[str, Any]]:
    try:
        while report.poll(WAIT_S):
            yield report.recv()
    except EOFError:
        pass
    process.join(WAIT_S)
    if process.is_alive():
        process.kill()
        yield "error", "hung"


def forked(answer: Callable[[], Any]) -> Any:
    """The result of `answer()` in a forked process."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()

    def target() -> None:
        theirs.send(answer())
        theirs.close()
        os._exit(0)

    process = context.Process(target=target)
    process.start()
    theirs.close()
    try:
        return ours.recv()
    finally:
        process.join()


def restored(root: Path) -> int:
    """The step that a restore finds; 0 if it finds none, -1 if its values are not those of that step."""
    try:
        found = checkpoint.restore(root)
    except CheckpointError:
        return 0
    expected = state(0, 1, found.step)
    same = all(np.array_equal(found.state[key], expected[key]) for key in expected)
    return found.step if same else -1


def is_survived(case: Case, result: dict[str, Any]) -> bool:
    """Whether the restored step is the last acknowledged or a later one, and a fault that did not kill the process raised an error."""
    if case.what == "vanished":
        return result["restored"] == 0 and bool(result["errors"]) if result["errors"] else result["restored"] >= 2
    if "hung" in result["errors"] or result["restored"] < max(1, result["acknowledged"]):
        return False
    return bool(result["errors"]) or result["acknowledged"] >= 2 or case.what == "kill"


def cases() -> list[Case]:
    """All combinations of fault, point, processes and kind of save."""
    found = [
        Case("kill", point, victims, 2, wait)
        for point, victims, wait in itertools.product(range(POINTS), ((0,), (1,), (0, 1)), (True, False))
    ]
    found += [Case("kill", point, (0,), 1, wait) for point, wait in itertools.product(range(POINTS), (True, False))]
    kinds = ["full", "slow", "vanished"] + (["read-only"] if can_mount() else [])
    found += [
        Case(what, point, (0,), size, wait) for what, point, size, wait in itertools.product(kinds, range(POINTS), (1, 2), (True, False))
    ]
    return found


def can_mount() -> bool:
    """Whether this process may mount a file system, which the read-only disk needs."""
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(["mount", "-t", "tmpfs", "none", folder], capture_output=True, check=False)
        if done.returncode == 0:
            subprocess.run(["umount", folder], check=True)
        return done.returncode == 0


def prepared(case: Case, folder: Path) -> Path:
    """A folder for a case, on its own file system for the read-only disk."""
    folder.mkdir()
    if case.what == "read-only":
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "none", str(folder)], check=True)
    return folder


def main(options: Options) -> int:
    chosen = cases()
    if options.cases:
        chosen = [chosen[i * len(chosen) // options.cases] for i in range(min(options.cases, len(chosen)))]
    outcomes: list[tuple[Case, bool]] = []
    failures: list[str] = []
    with tempfile.TemporaryDirectory() as base:
        events: dict[tuple[int, bool], int] = {}
        for number, case in enumerate(chosen):
            folder = prepared(case, Path(base) / str(number))
            try:
                kind = case.size, case.wait
                if kind not in events:
                    without_fault = folder.with_name(f"without_fault{case.size}{case.wait}")
                    without_fault.mkdir()
                    events[kind] = run(Case("none", 0, (), case.size, case.wait), without_fault, 0)["events"]
                at = 1 + case.point * events[kind] // POINTS
                if case.victims == (1,):
                    at = max(1, at // 3)  # process 1 has fewer events: it writes no array and no manifest
                result = run(case, folder, at)
            finally:
                if case.what == "read-only":
                    subprocess.run(["umount", "-l", str(folder)], check=True)
                shutil.rmtree(folder, ignore_errors=True)
            outcomes.append((case, is_survived(case, result)))
            if not outcomes[-1][1]:
                failures.append(f"{case}: {result}")
    report = summary(outcomes)
    options.json.write_text(json.dumps({"cases": report, "events_of_a_save": {str(k): v for k, v in events.items()}}, indent=1) + "\n")
    table = rich.table.Table("what", "cases", "survived")
    for what, (survived, total) in report.items():
        table.add_row(what, str(total), str(survived))
    rich.print(table, *failures)
    return 1 if failures else 0


def summary(outcomes: list[tuple[Case, bool]]) -> dict[str, tuple[int, int]]:
    """Number of survived cases and of all cases, by fault."""
    total, survived = Counter(case.what for case, _ in outcomes), Counter(case.what for case, good in outcomes if good)
    return {what: (survived[what], total[what]) for what in total} | {"all": (sum(survived.values()), sum(total.values()))}


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Options)))
