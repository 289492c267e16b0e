"""Preemption: after SIGTERM to any process, all processes agree on the step before which they stop.

    for step in range(start, steps):
        if mesh.should_stop(step):
            save(step)
            sys.exit(mesh.PREEMPTED)
        train_step(...)

# Note [One step for all]
Processes are not at the same step: devices run behind Python, and one process gets the signal before the others hear of it.
So each process reports, on the thread that hears notices, the first step before which it can still stop: the last step that it
entered, plus one. The agreed step is the largest of these. A process that reaches `should_stop` before all have reported waits there. It
has dispatched every step that the others may still be in, so no other process waits for it in a collective.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from mesh._mesh_errors import JobError, message
from mesh.job._timeouts import AGREE_ON_STOP_S


class Preemption:
    """The last step that this process entered, and the reports of all processes on where they can stop.

    Args:
        count: number of processes.
        say: callback that sends to all processes the first step before which this one can stop.
    """

    def __init__(self, count: int, say: Callable[[int], None]) -> None:
        self._count, self._say = count, say
        self._lock = threading.Lock()
        self._reached = threading.Condition(self._lock)
        self._entered = -1
        self._asked = False
        self._steps: dict[int, int] = {}

    @property
    def is_asked(self) -> bool:
        """Whether any process received SIGTERM."""
        return self._asked

    def ask(self) -> None:
        """Handle a stop request to any process: report this process's first possible step, once."""
        with self._lock:
            if self._asked:
                return
            self._asked = True
            first = self._entered + 1
        self._say(first)

    def hear(self, index: int, step: int) -> None:
        """Record that process `index` can stop before `step` at the earliest."""
        with self._reached:
            self._steps[index] = step
            self._reached.notify_all()

    def should_stop(self, step: int) -> bool:
        """Whether to stop before `step`: True from the agreed step on, the same in every process. Called before each step.

        Raises:
            JobError: a process did not report its step in time.
        """
        with self._reached:
            if not self._asked:
                self._entered = step
                return False
            if not self._reached.wait_for(lambda: len(self._steps) == self._count, AGREE_ON_STOP_S):
                silent = [i for i in range(self._count) if i not in self._steps]
                raise JobError(
                    message(
                        f"process {', '.join(map(str, silent))} did not report within {AGREE_ON_STOP_S:g} s at which step it can stop",
                        f"{len(self._steps)} of {self._count} processes did",
                        fix="check the last lines of its output",
                    )
                )
            return step >= max(self._steps.values())
