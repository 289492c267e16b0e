"""Logs every retrace to the logger "spmd.compile": at level INFO, and at WARNING when the number of retraces reaches the limit.

At the limit there is also a Python warning. Without logging handlers, `logging` would print its own warning to stderr in addition, so the
level is INFO then.
"""

from __future__ import annotations

import logging
from collections.abc import Generator
from contextlib import contextmanager

from spmd.base._errors import TraceError, message

_log = logging.getLogger("spmd.compile")


def log_retrace(name: str, reason: str, times: int, limit: int) -> None:
    """Log that `name` was traced again.

    Args:
        name: name of the compiled function.
        reason: the reason for the retrace.
        times: the number of retraces so far.
        limit: the number of retraces at which the level is WARNING.
    """
    is_warning = times == limit and _log.hasHandlers()
    _log.log(logging.WARNING if is_warning else logging.INFO, "%s is traced again (%d): %s", name, times, reason)


@contextmanager
def noting_retrace(name: str, reason: str | None) -> Generator[None]:
    """Context of a trace whose TraceErrors get a note with the reason for it, if it is not the first."""
    try:
        yield
    except TraceError as error:
        if reason is not None:
            error.add_note(f"{name} was traced again because {reason}")
        raise


def too_often(name: str, times: int, reason: str) -> str:
    """The warning for a function that was traced again `times` times, the last time for `reason`."""
    return message(
        f"{name} was traced again {times} times, and each trace costs a compilation",
        f"the last reason: {reason}",
        fix="keep the value that changes constant, or pass it as a tensor; .retraces has all reasons",
    )


def never_ends(name: str, times: int, last: BaseException) -> TraceError:
    """The error for a function whose traces in one call ask for another one, the last of them by `last`."""
    what = f"{name} was traced {times} times in one call, and each trace asked for another one ({type(last).__name__})"
    return TraceError(message(what, fix="create modules, optimizers and containers of tensors once, outside of the function"))


__all__ = ["log_retrace", "never_ends", "noting_retrace", "too_often"]
