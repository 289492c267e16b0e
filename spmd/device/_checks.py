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
from spmd.base._errors import CheckFailed, TraceError, message

ZERO = int(np.iinfo(np.int64).max)  # a flag that is set to 0
_WAITING = 8  # calls whose flags may be waiting: the oldest is waited for, which bounds what is held


@dataclass(frozen=True)
class Check:
    """What a flag stands for.

    Attributes:
        kind: the exception that eager code would raise.
        text: what was checked, in one line; `{}` stands for the value that the flag holds.
        at: `file:line in function` of the user.
        fix: what to do about it.
        elsewhere: what happens without a program, if that is not `kind`.
    """

    kind: type[BaseException]
    text: str
    at: str
    fix: str = "call the function without spmd.compile to see the values where they are checked"
    elsewhere: str = ""

    def failed(self, value: int) -> Exception:
        """The exception for a flag that is set to `value`; of the class that eager code raises too."""
        return _class_of(self.kind)(
            message(
                f"a check on the device failed: {self.text.replace('{}', str(0 if value == ZERO else value))}",
                *([f"called at {self.at}"] if self.at else ()),
                f"{self.elsewhere or _elsewhere(self.kind)}; the device went on, and what was updated since may hold what follows",
                fix=self.fix,
            )
        )


def _elsewhere(kind: type[BaseException]) -> str:
    """What happens without a program."""
    return "Python has another kind of number there" if issubclass(kind, TraceError) else f"CPU torch raises {kind.__name__} there"


@functools.cache
def _class_of(kind: type[BaseException]) -> type[CheckFailed]:
    try:
        return type("CheckFailed", (CheckFailed, kind), {"__module__": CheckFailed.__module__})
    except TypeError:  # two classes that no object can be at once
        return CheckFailed


_pending: deque[tuple[Any, Sequence[Check]]] = deque()


def stacked(flags: Sequence[Any]) -> Any:
    """The flags of one program as one array [checks] of int64: bools, or values of which 0 says that all is well."""
    with exact_dtypes():
        return jnp.stack([jnp.asarray(flag).reshape(()).astype(jnp.int64) for flag in flags])


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
    values = np.asarray(jax.device_get(flags)).reshape(-1, len(checks))
    step, failed = next(iter(np.argwhere(values).tolist()), (0, -1))
    if failed >= 0:
        _pending.clear()
        raise checks[failed].failed(int(values[step, failed]))


__all__ = ["Check", "note", "raise_failed", "stacked"]
