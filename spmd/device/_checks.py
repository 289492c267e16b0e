"""Checks that a program makes on the device. A failure is raised at the next read on the host, at the latest.

The program returns one flag per check. Every read on the host inspects all pending flags. Every further call first inspects the flags
of calls that have finished, without waiting for the others, and does not run if one has failed.
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

ZERO = int(np.iinfo(np.int64).max)  # stands for the offending value 0, because a flag of 0 means success
_WAITING = 8  # maximum number of calls with pending flags; beyond it the oldest is waited for, which bounds memory


@dataclass(frozen=True)
class Check:
    """One check of a program, and the error to raise if it fails.

    Attributes:
        kind: the exception that eager code would raise.
        text: what was checked, in one line; `{}` stands for the value of the flag.
        at: `file:line in function` in the user's code.
        fix: the fix that the error suggests.
        elsewhere: what happens outside a program, if it is not an exception of class `kind`.
    """

    kind: type[BaseException]
    text: str
    at: str
    fix: str = "call the function without spmd.compile to see the values at the check"
    elsewhere: str = ""

    def failed(self, value: int) -> Exception:
        """The exception for a flag with the nonzero `value`. It is also an instance of `kind`."""
        return _class_of(self.kind)(
            message(
                f"a check on the device failed: {self.text.replace('{}', str(0 if value == ZERO else value))}",
                *([f"called at {self.at}"] if self.at else ()),
                f"{self.elsewhere or _elsewhere(self.kind)}; the device continued, so tensors updated since then may be wrong",
                fix=self.fix,
            )
        )


def _elsewhere(kind: type[BaseException]) -> str:
    """The part of the message that says what happens outside a program."""
    return "Python has another kind of number there" if issubclass(kind, TraceError) else f"CPU torch raises {kind.__name__} there"


@functools.cache
def _class_of(kind: type[BaseException]) -> type[CheckFailed]:
    try:
        return type("CheckFailed", (CheckFailed, kind), {"__module__": CheckFailed.__module__})
    except TypeError:  # the two classes have incompatible layouts
        return CheckFailed


_pending: deque[tuple[Any, Sequence[Check]]] = deque()


def stacked(flags: Sequence[Any]) -> Any:
    """The flags of one program as one int64 array [checks]. A flag is a bool or an integer; 0 means that the check passed."""
    with exact_dtypes():
        return jnp.stack([jnp.asarray(flag).reshape(()).astype(jnp.int64) for flag in flags])


def note(flags: Any, checks: Sequence[Check]) -> None:
    """Record the flags, [checks] or [steps, checks], of a call that was just dispatched."""
    if not _pending:
        atexit.unregister(raise_failed)
        atexit.register(raise_failed)  # for a process that reads nothing before it exits
    _pending.append((flags, checks))


def raise_known() -> None:
    """Raise the error of the first check that is known to have failed, if any. For the beginning of a call that will make checks."""
    while _pending and (len(_pending) >= _WAITING or _pending[0][0].is_ready()):
        _raise_first()


def raise_failed() -> None:
    """Wait for all pending calls, and raise the error of the first check that failed, if any."""
    while _pending:
        _raise_first()


def _raise_first() -> None:
    flags, checks = _pending.popleft()
    values = np.asarray(jax.device_get(flags)).reshape(-1, len(checks))
    step, failed = next(iter(np.argwhere(values).tolist()), (0, -1))
    if failed >= 0:
        _pending.clear()
        raise checks[failed].failed(int(values[step, failed]))


__all__ = ["Check", "note", "raise_failed", "raise_known", "stacked"]
