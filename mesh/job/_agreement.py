"""Agreement: what all processes of a job must hold alike is compared, and the process that differs is named.

Two forms. `compare` is a meeting: every process brings named items before a program runs for the first time, and nobody
goes on until they are found equal. `Steps` is a running check: each process notes what it feeds, every step's notes are
compared in the background, and a step is not begun before the last one was found equal. Items are short
digests; process 0 compares and tells the others.
"""

from __future__ import annotations

import json
import queue
import threading
import zlib
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from mesh._mesh_errors import JobError, message
from mesh.job._service import Service, ServiceLost
from mesh.job._timeouts import COMPARE_STEP_S

Items = Mapping[str, str]
_FINE = "ok"
_RAISE_S = 3.0


def digest(data: Any, so_far: int = 0) -> int:
    """CRC-32 of a buffer (contiguous bytes), continued from `so_far`; 6 GB/s."""
    return zlib.crc32(data, so_far)


def compare(service: Service, index: int, name: str, items: Items, timeout_s: float) -> None:
    """Wait until every process has brought its items for `name`, and they are equal.

    Args:
        items: by name; a value is short and says enough to be shown.

    Raises:
        JobError: a process differs, or did not come in time; every process gets the same text, which names it.
    """
    folder = f"spmd/same/{name}"
    service.set(f"{folder}/{index}", json.dumps(dict(items)))
    if index == 0:
        verdict = _gathered(service, folder, name, timeout_s)
        service.set(f"{folder}/verdict", verdict)
    else:
        verdict = service.get(f"{folder}/verdict", timeout_s + 5.0) or _absent(name, [0], timeout_s)
    if verdict != _FINE:
        raise JobError(verdict)


def _gathered(service: Service, folder: str, name: str, timeout_s: float) -> str:
    brought: dict[int, dict[str, str]] = {}
    for other in range(service.count):
        text = service.get(f"{folder}/{other}", timeout_s)
        if text is None:
            there = service.below(folder)
            return _absent(name, [i for i in range(service.count) if str(i) not in there], timeout_s)
        brought[other] = json.loads(text)
    return difference(name, brought) or _FINE


def _absent(name: str, absent: list[int], timeout_s: float) -> str:
    return message(
        f"process {', '.join(map(str, absent))} did not reach {name} within {timeout_s:g} s",
        "the others are about to run it",
        fix="check what it does instead: all processes must call the same functions in the same order",
    )


def difference(name: str, brought: Mapping[int, Items]) -> str | None:
    """What is wrong with items that should be equal, or None: the item and the processes that are in the minority."""
    for item in dict.fromkeys(key for items in brought.values() for key in items):
        values = {index: items.get(item, "missing") for index, items in brought.items()}
        if len(set(values.values())) == 1:
            continue
        usual = Counter(values.values()).most_common(1)[0][0]
        if list(values.values()).count(values[0]) * 2 >= len(values):  # of two halves, process 0's is the measure
            usual = values[0]
        odd = [index for index, value in values.items() if value != usual]
        rest = next(index for index, value in values.items() if value == usual)
        return message(
            f"process {', '.join(map(str, odd))} differs from the others at {name}: {item}",
            f"process {odd[0]}: {values[odd[0]]}",
            f"process {rest}: {usual}",
            fix="make it the same in all processes: the program, its arguments, the mesh, the seed and the data order",
        )
    return None


class Steps:
    """The running check.

    Args:
        service: where the notes meet.
        index: this process.
        fail: ends the process, for when the main thread does not come back to hear of a difference.
    """

    def __init__(self, service: Service, index: int, fail: Callable[[str, int], None]) -> None:
        self._service, self._index, self._fail = service, index, fail
        self._same: dict[str, int] = {}
        self._queue: queue.SimpleQueue[tuple[int, str] | None] = queue.SimpleQueue()
        self._checked = threading.Condition()
        self._num_checked, self._begun = 0, 0
        self._problem: str | None = None
        self._thread: threading.Thread | None = None

    def note(self, item: str, crc: int) -> None:
        """Something that all processes feed alike went into the next step: a batch, a learning rate, a position."""
        self._same[item] = zlib.crc32(crc.to_bytes(4, "little"), self._same.get(item, 0))

    def taken(self) -> dict[str, str]:
        """What was noted as equal since the last step, taken out: for the meeting before the first step."""
        same, self._same = self._same, {}
        return {item: f"{crc:08x}" for item, crc in same.items()}

    def begin(self) -> None:
        """A step begins with what was noted since the last one.

        Raises:
            JobError: a process differed one step ago.
        """
        text = json.dumps(self.taken())
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="agreement", daemon=True)
            self._thread.start()
        number, self._begun = self._begun, self._begun + 1
        self._queue.put((number, text))
        with self._checked:
            came = self._checked.wait_for(lambda: self._problem is not None or self._num_checked >= number, COMPARE_STEP_S)
        if self._problem is not None:
            problem, self._problem = self._problem, ""
            raise JobError(problem or "the processes differ")
        if not came:
            raise JobError(_absent(f"step {number - 1}", self._silent(number - 1), COMPARE_STEP_S))

    def stop(self) -> None:
        """The process ends in order: finish what was begun."""
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join(5.0)

    def _run(self) -> None:
        while (work := self._queue.get()) is not None:
            number, text = work
            try:
                verdict = self._verdict(number, text)
            except ServiceLost:  # the listener of notices deals with it
                return
            with self._checked:
                self._num_checked = number + 1
                self._problem = None if verdict == _FINE else verdict
                self._checked.notify_all()
            if verdict != _FINE:
                self._insist(verdict)
                return

    def _insist(self, verdict: str) -> None:
        """The main thread raises the error at its next step; if it hangs in a collective, it never gets there."""
        threading.Event().wait(_RAISE_S)
        if self._problem:
            self._fail(verdict, 1)

    def _verdict(self, number: int, text: str) -> str:
        service, folder = self._service, f"spmd/step/{number}"
        service.set(f"{folder}/{self._index}", text)
        if self._index:
            return service.get(f"{folder}/verdict", COMPARE_STEP_S) or _absent(f"step {number}", [0], COMPARE_STEP_S)
        brought: dict[int, dict[str, str]] = {}
        for other in range(service.count):
            theirs = text if other == 0 else service.get(f"{folder}/{other}", COMPARE_STEP_S)
            if theirs is None:
                brought.clear()
                break
            brought[other] = json.loads(theirs)
        name = f"step {number}"
        verdict = difference(name, brought) or _FINE if brought else _absent(name, self._silent(number), COMPARE_STEP_S)
        service.set(f"{folder}/verdict", verdict)
        if number >= 2:
            service.delete(f"spmd/step/{number - 2}")
        return verdict

    def _silent(self, number: int) -> list[int]:
        there = self._service.below(f"spmd/step/{number}")
        return [i for i in range(self._service.count) if str(i) not in there]
