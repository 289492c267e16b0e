"""What the processes of a job tell each other while they save or restore: only through jax's coordination service, whose
waits end and name who did not arrive. A job of one process needs none of it.

    gang = current_gang()
    answers = gang.exchange("saved", "ok")        # one text per process, the same list everywhere
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

_GRACE_S = 5.0  # so that process 0 can still say who is missing


class Gang(Protocol):
    """The processes of a job: which one this is, how many there are, and a way to hear from all."""

    @property
    def index(self) -> int: ...
    @property
    def size(self) -> int: ...

    def exchange(self, name: str, text: str) -> list[str]:
        """Every process's text, in order of their numbers, once all have called it; a barrier."""
        ...


@dataclass(frozen=True)
class Alone:
    """A job of one process."""

    index: int = 0
    size: int = 1

    def exchange(self, name: str, text: str) -> list[str]:
        return [text]


class Coordinated:
    """A job of several processes. Each kind of exchange counts its own rounds, so all must make the same calls in order."""

    _rounds: itertools.count[int] = itertools.count()

    def __init__(self, timeout_s: float = SAVE_S) -> None:
        self.index, self.size = jax.process_index(), jax.process_count()
        self._service, self._timeout_s = Service(self.size), timeout_s
        self._scope = f"spmd/{next(self._rounds)}"
        self._number = 0

    def exchange(self, name: str, text: str) -> list[str]:
        """Process 0 collects the texts and publishes them together, so that the service answers 2n questions, not n squared."""
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
                self._service.delete(done)  # everybody is past it: they took part in the round after it
        except mesh.JobError as error:
            raise CheckpointError(str(error)) from error
        if isinstance(answer, str):
            raise CheckpointError(answer)
        return answer

    def _collected(self, folder: str, text: str, name: str, deadline: float) -> list[str] | str:
        """All texts; or, if one does not come in time, the error that everybody gets."""
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
    """The processes of this job. Call it on the main thread, in the same order on every process."""
    return Alone() if jax.process_count() == 1 else Coordinated()


__all__ = ["Alone", "Coordinated", "Gang", "current_gang"]
