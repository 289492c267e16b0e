"""Agreement: compares values that must be equal in all processes of a job, and names the process that differs.

There are two forms. `compare` is a barrier: every process passes named items before a program runs for the first time, and waits
until all are found equal. `StepChecks` works in the background: each process records the inputs of its steps, and a step
does not begin before the previous one was found equal. Items are short digests; process 0 compares them and sends the result.
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
_EQUAL = "ok"
_RAISE_S = 3.0  # for the main thread to raise the error of a step itself


def digest(data: Any, so_far: int = 0) -> int:
    """CRC-32 of a buffer (contiguous bytes), continued from `so_far`; 6 GB/s."""
    return zlib.crc32(data, so_far)


def compare(service: Service, index: int, name: str, items: Items, timeout_s: float) -> None:
    """Wait until every process has passed its items for `name`, and check that they are equal.

    Args:
        service: the coordination service that stores the items.
        index: index of this process.
        name: name of the comparison, e.g. "program 0 (step)"; used once.
        items: values by name, short and readable, because an error shows them.
        timeout_s: seconds to wait for the other processes.

    Raises:
        JobError: a process differs, or did not arrive in time. Every process raises the same text, which names that process.
    """
    folder = f"spmd/same/{name}"
    service.set(f"{folder}/{index}", json.dumps(dict(items)))
    if index == 0:
        verdict = _compared(service, folder, name, timeout_s)
        service.set(f"{folder}/verdict", verdict)
    else:
        verdict = service.get(f"{folder}/verdict", timeout_s + 5.0) or _absent(name, [0], timeout_s)
    if verdict != _EQUAL:
        raise JobError(verdict)


def _compared(service: Service, folder: str, name: str, timeout_s: float) -> str:
    """Verdict of process 0 once it has the items of every process: `_EQUAL`, or the text of an error."""
    gathered: dict[int, dict[str, str]] = {}
    for other in range(service.count):
        text = service.get(f"{folder}/{other}", timeout_s)
        if text is None:
            present = service.get_folder(folder)
            return _absent(name, [i for i in range(service.count) if str(i) not in present], timeout_s)
        gathered[other] = json.loads(text)
    return difference(name, gathered) or _EQUAL


def _absent(name: str, absent: list[int], timeout_s: float) -> str:
    return message(
        f"process {', '.join(map(str, absent))} did not reach {name} within {timeout_s:g} s",
        "the other processes wait for it there",
        fix="check its last output: all processes must call the same compiled functions in the same order",
    )


def difference(name: str, gathered: Mapping[int, Items]) -> str | None:
    """Error text for the first item that is not equal in all processes, or None.

    Args:
        name: name of the comparison, for the text.
        gathered: the items of each process, by its index.

    Returns:
        A text that names the item and the processes in the minority. If there is no majority, process 0 counts as right.
    """
    for item in dict.fromkeys(key for items in gathered.values() for key in items):
        values = {index: items.get(item, "missing") for index, items in gathered.items()}
        if len(set(values.values())) == 1:
            continue
        expected = Counter(values.values()).most_common(1)[0][0]
        if list(values.values()).count(values[0]) * 2 >= len(values):  # two equal halves: that of process 0 counts as right
            expected = values[0]
        odd = [index for index, value in values.items() if value != expected]
        rest = next(index for index, value in values.items() if value == expected)
        return message(
            f"process {', '.join(map(str, odd))} differs from the others at {name}: {item}",
            f"process {odd[0]}: {values[odd[0]]}",
            f"process {rest}: {expected}",
            fix="make it equal in all processes: the same program, arguments, mesh, seed and data order everywhere",
        )
    return None


class StepChecks:
    """Compares the inputs of every step between the processes, in the background.

    Args:
        service: the coordination service that stores the digests.
        index: index of this process.
        fail: called with an error text and an exit code to end the process, if the main thread does not return to raise the error.
    """

    def __init__(self, service: Service, index: int, fail: Callable[[str, int], None]) -> None:
        self._service, self._index, self._fail = service, index, fail
        self._digests: dict[str, int] = {}
        self._queue: queue.SimpleQueue[tuple[int, str] | None] = queue.SimpleQueue()
        self._checked = threading.Condition()
        self._num_checked, self._num_begun = 0, 0
        self._problem: str | None = None
        self._thread: threading.Thread | None = None

    def note(self, item: str, crc: int) -> None:
        """Record an input of the next step that must be equal in all processes: a batch, a learning rate, the random stream."""
        self._digests[item] = zlib.crc32(crc.to_bytes(4, "little"), self._digests.get(item, 0))

    def _take(self) -> dict[str, str]:
        """Return the inputs recorded since the previous step, as hexadecimal digests by name, and clear them."""
        digests, self._digests = self._digests, {}
        return {item: f"{crc:08x}" for item, crc in digests.items()}

    def begin(self) -> None:
        """Begin a step with the inputs recorded since the previous one. Waits until the previous step was compared.

        Raises:
            JobError: the inputs of the previous step differed, or a process did not report them in time.
        """
        text = json.dumps(self._take())
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="agreement", daemon=True)
            self._thread.start()
        number, self._num_begun = self._num_begun, self._num_begun + 1
        self._queue.put((number, text))
        with self._checked:
            is_compared = self._checked.wait_for(lambda: self._problem is not None or self._num_checked >= number, COMPARE_STEP_S)
        if self._problem is not None:
            problem, self._problem = self._problem, ""
            raise JobError(problem or "the processes differ")
        if not is_compared:
            raise JobError(_absent(f"step {number - 1}", self._silent(number - 1), COMPARE_STEP_S))

    def stop(self) -> None:
        """Finish the comparisons that were begun, at the normal end of the process."""
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join(5.0)

    def _run(self) -> None:
        while (work := self._queue.get()) is not None:
            number, text = work
            try:
                verdict = self._verdict(number, text)
            except ServiceLost:  # the thread that receives notices handles this
                return
            with self._checked:
                self._num_checked = number + 1
                self._problem = None if verdict == _EQUAL else verdict
                self._checked.notify_all()
            if verdict != _EQUAL:
                self._fail_unless_raised(verdict)
                return

    def _fail_unless_raised(self, verdict: str) -> None:
        """End the process if the main thread does not raise the error at its next step, because it hangs in a collective."""
        threading.Event().wait(_RAISE_S)
        if self._problem:
            self._fail(verdict, 1)

    def _verdict(self, number: int, text: str) -> str:
        """Result of the comparison of step `number`, in every process: `_EQUAL`, or the text of an error."""
        service, folder = self._service, f"spmd/step/{number}"
        service.set(f"{folder}/{self._index}", text)
        if self._index:
            return service.get(f"{folder}/verdict", COMPARE_STEP_S) or _absent(f"step {number}", [0], COMPARE_STEP_S)
        gathered: dict[int, dict[str, str]] = {}
        for other in range(service.count):
            theirs = text if other == 0 else service.get(f"{folder}/{other}", COMPARE_STEP_S)
            if theirs is None:
                gathered.clear()
                break
            gathered[other] = json.loads(theirs)
        name = f"step {number}"
        verdict = difference(name, gathered) or _EQUAL if gathered else _absent(name, self._silent(number), COMPARE_STEP_S)
        service.set(f"{folder}/verdict", verdict)
        if number >= 2:
            service.delete(f"spmd/step/{number - 2}")
        return verdict

    def _silent(self, number: int) -> list[int]:
        """The processes that have not reported the inputs of this step."""
        present = self._service.get_folder(f"spmd/step/{number}")
        return [i for i in range(self._service.count) if str(i) not in present]
