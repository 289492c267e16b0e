"""Messages between the processes of a job while they save or restore, through jax's coordination service alone.

Every wait has a timeout, and its error names the process that did not arrive. A job of one process needs no service.

    gang = current_gang()
    answers = gang.exchange("saved", "ok")        # one text per process, the same list on every process
"""

from __future__ import annotations

import itertools
import json
import time
from dataclasses import dataclass
from typing import Protocol

import jax

import mesh
from mesh.job._service import Service
from mesh.job._timeouts import SAVE_S
from spmd.base._errors import CheckpointError, message

_GRACE_S = 5.0  # the others wait this much longer, so that process 0 can still publish which process is missing


class Gang(Protocol):
    """The processes of a job: the index of this one, their number, and an all-gather of texts."""

    @property
    def index(self) -> int: ...
    @property
    def size(self) -> int: ...

    def exchange(self, name: str, text: str) -> list[str]:
        """All-gather of one text per process, ordered by process index. Also a barrier.

        Args:
            name: name of the barrier, for the error of a process that does not arrive.
            text: this process's text.

        Raises:
            CheckpointError: a process did not arrive within the timeout.
        """
        ...


@dataclass(frozen=True)
class Alone:
    """A job of one process."""

    index: int = 0
    size: int = 1

    def exchange(self, name: str, text: str) -> list[str]:
        return [text]


class Coordinated:
    """A job of several processes.

    Exchanges are matched by counting, so all processes must create the same objects and make the same calls in the same order.
    """

    _rounds: itertools.count[int] = itertools.count()

    def __init__(self, timeout_s: float = SAVE_S) -> None:
        self.index, self.size = jax.process_index(), jax.process_count()
        self._service, self._timeout_s = Service(self.size), timeout_s
        self._scope = f"spmd/{next(self._rounds)}"
        self._number = 0

    def exchange(self, name: str, text: str) -> list[str]:
        """Gather on process 0, which publishes the whole list: the service answers 2n requests instead of n squared."""
        folder, done = f"{self._scope}/{self._number}", f"{self._scope}/{self._number - 2}/"
        self._number += 1
        deadline = time.monotonic() + self._timeout_s
        try:
            if self.index:
                self._service.set(f"{folder}/{self.index}", text)
                answer = json.loads(self._get(f"{folder}/all", "process 0", name, deadline + _GRACE_S))
            else:
                answer = self._collected(folder, text, name, deadline)
                self._service.set(f"{folder}/all", json.dumps(answer))
                self._service.delete(done)  # all processes have read it, since all took part in the round after it
        except mesh.JobError as error:
            raise CheckpointError(str(error)) from error
        if isinstance(answer, str):
            raise CheckpointError(answer)
        return answer

    def _collected(self, folder: str, text: str, name: str, deadline: float) -> list[str] | str:
        """All texts; or, if a process does not arrive in time, the error message for all processes."""
        texts = [text]
        try:
            for other in range(1, self.size):
                texts.append(self._get(f"{folder}/{other}", f"process {other}", name, deadline))
        except CheckpointError as error:
            return str(error)
        return texts

    def _get(self, key: str, who: str, name: str, deadline: float) -> str:
        value = self._service.get(key, deadline - time.monotonic())
        if value is None:
            raise CheckpointError(
                message(
                    f"{who} did not arrive at '{name}' within {self._timeout_s:.0f} s",
                    fix="check the last output of that process; all processes must save and restore at the same steps",
                )
            )
        return value


def current_gang() -> Gang:
    """The processes of this job. Must be called on the main thread, and in the same order on every process."""
    return Alone() if jax.process_count() == 1 else Coordinated()


__all__ = ["Alone", "Coordinated", "Gang", "current_gang"]
