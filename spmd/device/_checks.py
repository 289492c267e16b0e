"""Checks that a program makes on the device: a failure is raised when something is read, at the latest.

The program returns a flag for each check. They are looked at whenever something is read on the host, and at the next call those of the
calls that are done: nobody waits for them.
"""

from __future__ import annotations

import atexit
import functools
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spmd.base._convert import exact_dtypes
from spmd.base._errors import CheckFailed, message

_WAITING = 8  # calls whose flags may be waiting: the oldest is waited for, which bounds what is held


@dataclass(frozen=True)
class Check:
    """What a flag stands for.

    Attributes:
        kind: the exception that eager code would raise.
        text: what was checked, in one line.
        at: `file:line in function` of the user.
    """

    kind: type[BaseException]
    text: str
    at: str

    def failed(self) -> Exception:
        """The exception for a flag that is set; of the class that eager code raises too."""
        return _class_of(self.kind)(
            message(
                f"a check in a compiled function failed: {self.text}",
                *([f"called at {self.at}"] if self.at else ()),
                f"eager code raises {self.kind.__name__} there; the program went on, and what it updates may hold what follows",
                fix="call the function without spmd.compile to see the values where they are checked",
            )
        )


@functools.cache
def _class_of(kind: type[BaseException]) -> type[CheckFailed]:
    try:
        return type("CheckFailed", (CheckFailed, kind), {"__module__": CheckFailed.__module__})
    except TypeError:  # two classes that no object can be at once
        return CheckFailed


_pending: deque[tuple[Any, Sequence[Check]]] = deque()


def stacked(flags: Sequence[Any]) -> Any:
    """The flags of one program as one bool array [checks]."""
    with exact_dtypes():
        return jnp.stack([jnp.asarray(flag).reshape(()) for flag in flags])


def note(flags: Any, checks: Sequence[Check]) -> None:
    """A call was dispatched whose program returns `flags`, [checks] or [steps, checks]. Raises what is known of earlier calls."""
    if not _pending:
        atexit.unregister(raise_failed)
        atexit.register(raise_failed)  # of a program that reads nothing more
    _pending.append((flags, checks))
    while _pending and (len(_pending) > _WAITING or (len(_pending) > 1 and _pending[0][0].is_ready())):
        _raise_first()


def raise_failed() -> None:
    """Raise the first check that failed in a call so far; waits for calls that are under way."""
    while _pending:
        _raise_first()


def _raise_first() -> None:
    flags, checks = _pending.popleft()
    failed = np.asarray(jax.device_get(flags)).reshape(-1, len(checks)).any(0)
    if failed.any():
        _pending.clear()
        raise checks[int(failed.argmax())].failed()


__all__ = ["Check", "note", "raise_failed", "stacked"]
