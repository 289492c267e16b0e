"""Notices: messages from one process to all others, delivered even while their main threads are blocked.

The notices form an ordered list in the coordination service.

A daemon thread of each process waits for the next notice and passes it to a callback. So a failure reaches the other processes
within milliseconds, even while they wait in a collective. The thread stops at the notice that its own process posts in `leave`:
a thread still waiting in the service while Python shuts down would abort the process.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from typing import Any

from mesh.job._service import Service, ServiceLost

_FOLDER = "spmd/notice"
_POLL_S = 2.0

Notice = dict[str, Any]


class Notices:
    """Posts notices to the job's list, and listens for new ones on a thread.

    Args:
        service: the coordination service that stores the list.
        index: index of this process, stored in each of its notices under "by".
        on_notice: called with each notice, in order, on the listening thread.
        on_lost: called on that thread when process 0 is gone.
    """

    def __init__(self, service: Service, index: int, on_notice: Callable[[Notice], None], on_lost: Callable[[ServiceLost], None]) -> None:
        self._service, self._index, self._on_notice, self._on_lost = service, index, on_notice, on_lost
        self._has_left = threading.Event()
        self._thread = threading.Thread(target=self._listen, name="notices", daemon=True)
        self._thread.start()

    def post(self, kind: str, **what: Any) -> None:
        """Send a notice of this kind to all processes, this one included.

        Raises:
            ServiceLost: process 0 is gone.
        """
        number = self._service.next_number("spmd/notices")
        self._service.set(f"{_FOLDER}/{number}", json.dumps({"kind": kind, "by": self._index, **what}))

    def leave(self) -> None:
        """Announce that this process ends normally, and stop listening."""
        try:
            self.post("left")
        except ServiceLost:
            return
        self._has_left.wait(3 * _POLL_S)
        self._thread.join(_POLL_S)

    def _listen(self) -> None:
        number = 0
        while True:
            try:
                text = self._service.get(f"{_FOLDER}/{number}", _POLL_S)
                if text is None:  # skip the gap left by a writer that died between taking a number and writing
                    number += self._service.try_get(f"{_FOLDER}/{number + 1}") is not None
                    continue
            except ServiceLost as lost:
                if not self._has_left.is_set():
                    self._on_lost(lost)
                return
            number += 1
            notice: Notice = json.loads(text)
            if notice["kind"] == "left" and notice["by"] == self._index:
                self._has_left.set()
                return
            self._on_notice(notice)
