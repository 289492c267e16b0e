"""Preemption: after SIGTERM to any process, all processes agree on the step before which they stop.

    for step in range(start, steps):
        if mesh.should_stop(step):
            save(step)
            sys.exit(mesh.PREEMPTED)
        train_step(...)

# Note [One step for all]
Processes are not at the same step: devices run behind Python, and one process gets the signal before the others receive the notice.
So each process reports the first step before which it can still stop: the last step that it entered, plus one. The thread that receives
notices does this. The agreed step is the largest of these. A process that reaches `should_stop` before all have reported waits there. It
has dispatched every step that the others may still be in, so no other process waits for it in a collective.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from mesh._mesh_errors import JobError, message
from mesh.job._timeouts import AGREE_ON_STOP_S


class Preemption:
    """Agreement of all processes on the step before which they stop.

    Args:
        count: number of processes.
        send: called with the first step before which this process can stop, to send it to all processes.
    """

    def __init__(self, count: int, send: Callable[[int], None]) -> None:
        self._count, self._send = count, send
        self._lock = threading.Lock()
        self._reached = threading.Condition(self._lock)
        self._entered = -1
        self._is_requested = False
        self._steps: dict[int, int] = {}

    def request_stop(self) -> None:
        """Handle a stop request to any process: report the first step before which this process can stop. Further calls have no effect."""
        with self._lock:
            if self._is_requested:
                return
            self._is_requested = True
            first = self._entered + 1
        self._send(first)

    def record(self, index: int, step: int) -> None:
        """Record that process `index` can stop before `step` at the earliest."""
        with self._reached:
            self._steps[index] = step
            self._reached.notify_all()

    def should_stop(self, step: int) -> bool:
        """Whether to stop before `step`: True from the agreed step on, in every process. Call it before each step.

        Raises:
            JobError: a process did not report its step in time.
        """
        with self._reached:
            if not self._is_requested:
                self._entered = step
                return False
            if not self._reached.wait_for(lambda: len(self._steps) == self._count, AGREE_ON_STOP_S):
                names = ", ".join(str(i) for i in range(self._count) if i not in self._steps)
                raise JobError(
                    message(
                        f"process {names} did not report the step at which it can stop within {AGREE_ON_STOP_S:g} s after SIGTERM",
                        f"{len(self._steps)} of {self._count} processes reported",
                        fix=f"check the last output of process {names}, and the network between the hosts",
                    )
                )
            return step >= max(self._steps.values())
