"""The exceptions of `spmd`, and the one form their messages take.

    SpmdError
    +-- UnsupportedOpError (NotImplementedError)   an ATen op without a lowering
    +-- TraceError (RuntimeError)                  Python wanted a value that only the compiled program will have
    +-- DroppedValueError (RuntimeError)           a tensor whose value the compiled program did not keep
    +-- NonFiniteError (FloatingPointError)        a module's output was not finite (compile(debug_nans=True))
    +-- ShardError (RuntimeError)                  pieces of a tensor do not fit it
    +-- DeviceSlotError (RuntimeError)             another package already owns PyTorch's PrivateUse1 device
    +-- CheckpointError (RuntimeError)             a checkpoint could not be written, is damaged, or does not fit

Specs and meshes raise `mesh.SpecError` and `mesh.DeviceError`, which live on the floor below.
"""

from __future__ import annotations

import os.path
import sys
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from contextvars import ContextVar

import torch

_HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))  # the folder of the whole package
_TORCH = os.path.dirname(os.path.abspath(torch.__file__))


# What was raised to a function while it was traced, whether or not the function let it pass.
_raised: ContextVar[list[Exception] | None] = ContextVar("raised", default=None)


class Noted(Exception):
    """An exception that a traced function must not catch for good (see `nothing_swallowed`)."""

    def __init__(self, *args: object) -> None:
        super().__init__(*args)
        raised = _raised.get()
        if raised is not None:
            raised.append(self)


class TraceAgain(Noted):
    """Not an error: the trace goes on no further and starts again, otherwise. Seen by nobody outside."""


class SpmdError(Noted):
    """Base of every exception that `spmd` itself raises."""


class UnsupportedOpError(SpmdError, NotImplementedError):
    """An ATen op was called on the device that has neither a lowering nor a decomposition."""


class TraceError(SpmdError, RuntimeError):
    """A value of a traced program was needed as a Python value."""


class DroppedValueError(SpmdError, RuntimeError):
    """A tensor was read whose value a compiled program computed but did not keep."""


class NonFiniteError(SpmdError, FloatingPointError):
    """A module computed an infinity or not-a-number, in a step compiled with `debug_nans=True`."""


class ShardError(SpmdError, RuntimeError):
    """The pieces given for a sharded tensor do not make one up."""


class DeviceSlotError(SpmdError, RuntimeError):
    """PyTorch's single slot for an out-of-tree device is taken by another package."""


class CheckpointError(SpmdError, RuntimeError):
    """A checkpoint could not be written, is damaged, or does not fit what it was restored into."""


@contextmanager
def nothing_swallowed() -> Generator[None]:
    """Around a function that is traced: what it caught of ours is raised when it ends, the first of them.

    An exception of its own that it raises instead passes, unless what it caught only asks for another trace.
    """
    raised: list[Exception] = []
    token = _raised.set(raised)
    try:
        yield
    except Exception as error:
        again = next((e for e in raised if isinstance(e, (TraceAgain, DroppedValueError))), None)
        if again is None or isinstance(error, (TraceAgain, SpmdError)):
            raise
        raise again from error
    finally:
        _raised.reset(token)
    if raised:
        raise raised[0]


def message(what: str, *details: str, fix: str) -> str:
    """Text of an error in the project's form: what is wrong, the values on both sides, the shortest fix."""
    return "\n".join([what, *(f"  {line}" for line in details), f"  fix: {fix}"])


def user_line() -> str:
    """`file:line in function` of the innermost frame that is neither ours, torch's nor jax's; empty if there is none."""
    frame = sys._getframe(1)
    while frame is not None:
        filename = frame.f_code.co_filename
        if not _is_library(filename):
            return f"{os.path.basename(filename)}:{frame.f_lineno} in {frame.f_code.co_name}"
        frame = frame.f_back
    return ""


def line_of(error: BaseException) -> str:
    """`file:line in function` of the user's innermost frame that `error` passed through; empty if there is none."""
    found, trace = "", error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        if not _is_library(code.co_filename):
            found = f"{os.path.basename(code.co_filename)}:{trace.tb_lineno} in {code.co_name}"
        trace = trace.tb_next
    return found


def called_at() -> Iterable[str]:
    """The detail line that names the user's own call, or nothing when no user frame is on the stack."""
    line = user_line()
    return [f"called at {line}"] if line else []


def _is_library(filename: str) -> bool:
    return filename.startswith((_HERE, _TORCH, "<")) or "/site-packages/" in filename or "/lib/python3" in filename
