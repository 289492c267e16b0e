"""The exceptions of `spmd`, the tree of all exceptions, and the user's line for their messages.

    Noted                                              recorded, even if a traced function catches it
    +-- SpmdError                                      base of all errors for users
    |   +-- MeshError (ValueError)                     mesh: a mesh, spec or device request is invalid
    |   |   +-- SpecError                              mesh: a PartitionSpec does not fit its mesh or its tensor
    |   |   |   +-- RulesError                         mesh: rules that probably do not do what was meant for a model
    |   |   |   +-- PlacementError                     DTensor placements do not fit their mesh or tensor
    |   |   |       +-- NoSuchDimError (IndexError)
    |   |   |       +-- UnreducedError (NotImplementedError)
    |   |   +-- DeviceError (RuntimeError)             mesh: too few devices, or requested too late
    |   +-- JobError (RuntimeError)                    mesh: the processes of a job cannot connect, or do not agree
    |   |   +-- ServiceLost                            process 0, or the connection to it, is lost
    |   +-- UnsupportedOpError (NotImplementedError)   an ATen op without a lowering
    |   +-- TraceError (RuntimeError)                  Python needed a value that is known only when the program runs
    |   |   +-- Untraceable                            a Dynamo graph cannot be compiled to one program
    |   +-- DroppedValueError (RuntimeError)           a tensor was read whose value the compiled program dropped
    |   |   +-- StaleGradients                         a gradient of an earlier call was accumulated into: retrace
    |   +-- NonFiniteError (FloatingPointError)        a module's output was not finite (compile(debug_nans=True))
    |   +-- CheckFailed                                a check on the device failed; also an instance of the class it raises
    |   +-- ShardError (RuntimeError)                  the shards passed for a tensor do not form one
    |   +-- DeviceSlotError (RuntimeError)             another package already owns PyTorch's PrivateUse1 device
    |   +-- CheckpointError (RuntimeError)             a checkpoint could not be written, is damaged, or does not match
    |   +-- NotPickled (PicklingError)                 a compiled function that another process cannot import
    |   +-- NoProgramFile (FileNotFoundError)          a file of compiled programs does not exist
    |   +-- ArgumentTypeError (TypeError)              an argument of a function is of a wrong type
    |   +-- UsageError                                 an invalid command line; reported in one line
    |   +-- GroupError (RuntimeError)                  a process group that does not exist in a single-process program
    |   +-- RecipeError (ValueError)                   a recipe is invalid
    |   +-- PeerError                                  a contender of a benchmark failed
    |   +-- AnnotationError (RuntimeError)             this and the following: errors that programs for torch_xla expect
    |   +-- CollectiveError (NotImplementedError)
    |   +-- NoShardingError (ValueError)
    |   +-- ProfileError (RuntimeError)                a profile would end the process
    |   +-- NoLayoutError (ValueError)
    |   +-- ScanError (ValueError)
    |   +-- MicroBatchError (ValueError)
    |   +-- ReplicaCountError (ValueError)
    |   +-- InputShardingError (ValueError)
    |   +-- NoInputShardingError (KeyError)
    |   +-- MutationError (AssertionError)
    |   +-- NoSeedError (AssertionError)
    |   +-- KernelError (AssertionError)
    |   +-- BackendError (AssertionError)
    |   +-- WrapError (RuntimeError)
    +-- TraceAgain                                     not an error: restarts the trace with other settings
        +-- UnequalCounters                            ... with counters lifted to inputs
        +-- AttributesNeeded                           ... with attributes of tensors in the signature of a call
        +-- NumbersNeeded                              ... with Python numbers as constants
        +-- TextsNeeded                                ... with texts of numbers that vary as constants
        +-- OutputsPutOff                              ... with all output at the end of the call, since it runs code of the user's
        +-- OutputsAtOnce                              ... with such output made at once
        +-- LateWritesNeeded                           ... with all writes to CPU tensors at the end of the call
        +-- CountsNeeded                               ... with integers that the host knows as Python integers
        +-- NumbersDrawn                               ... because another thread may have drawn random numbers
        +-- ContextNeeded                              ... in a copy of the context
        +-- ImportNeeded                               ... with a module imported that the function imports first
        +-- ViewNeeded                                 ... with indices of tensors as constants
        +-- OptimizerAsObject                          ... with an optimizer treated like any other object
        +-- StateBeforeStep                            ... with an optimizer's state created by its first step, not before
        +-- Undiscovered                               ... with a module or optimizer that had not been discovered
        +-- NewContainerTypes                          ... with more classes recognized as containers
        +-- NoChoice                                   ... with the condition of a block that cannot be computed unless it runs
        +-- SideNeeded                                 ... with the side of a branch that the device decides
        +-- OtherSides                                 ... with other sides of such branches
    Exception                                          internal: always caught by this package
    +-- StateComplete                                  an optimizer has all its state
    +-- NotTaken                                       no pending value can keep an argument until a call ends
    +-- NotALoop                                       repeated equations cannot become one loop
    +-- NotDeferrable                                  an operation cannot be deferred to the end of its step
    +-- _LoweredText                                   a program was lowered only for its text
    +-- NoDigest                                       the text of a traced program does not determine it
    +-- NotStorable                                    another process could not compare what a trace has read
    +-- NotHere                                        a stored trace does not fit this process
    +-- Inexact                                        padding would change a result, so sizes cannot share one program
        +-- SizeDecides                                ... Python branches on a size
        +-- Unknown                                    ... a number is not a known function of the sizes
    +-- NotCompiled                                    a call of generate falls back to transformers' loop
    +-- InMember                                       mesh: unwinds the launcher's frames in a forked process
    ValueError
    +-- ExportedProgramError                           in files written by `spmd.export`, which run without spmd
    UserWarning
    +-- AcceleratorIdle                                mesh: virtual devices were requested beside a real accelerator

Classes marked `mesh` are defined in `mesh`, on a lower floor.
"""

from __future__ import annotations

import os.path
import sys
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from typing import Any

import torch

from mesh._mesh_errors import Noted, noted
from mesh._mesh_errors import SpmdError as SpmdError
from mesh._mesh_errors import message as message

_HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))  # the folder of the whole package
_TORCH = os.path.dirname(os.path.abspath(torch.__file__))


class TraceAgain(Noted):
    """Not an error: ends the trace and restarts it with other settings. Never reaches the user."""

    def other_settings(self, settings: Any) -> Any:
        """The settings for the next trace.

        Args:
            settings: the `spmd.program.trace._trace_settings.TraceSettings` of the trace that this exception ended.
        """
        raise NotImplementedError


class UnsupportedOpError(SpmdError, NotImplementedError):
    """An ATen op without a lowering or a decomposition was called on the device."""


class TraceError(SpmdError, RuntimeError):
    """Python needed a value that is known only when the compiled program runs."""


class DroppedValueError(SpmdError, RuntimeError):
    """A tensor was read whose value a compiled program computed but dropped."""


class NonFiniteError(SpmdError, FloatingPointError):
    """A module's output was infinite or NaN, in a step compiled with `debug_nans=True`."""


class CheckFailed(SpmdError):
    """A check on the device failed (`if bad.any(): raise ...`); also an instance of the exception class that the check raises."""


class ShardError(SpmdError, RuntimeError):
    """The shards passed for a tensor do not form one."""


class DeviceSlotError(SpmdError, RuntimeError):
    """PyTorch's single slot for an out-of-tree device is taken by another package."""


class CheckpointError(SpmdError, RuntimeError):
    """A checkpoint could not be written, is damaged, or does not match the state to restore."""


class ArgumentTypeError(SpmdError, TypeError):
    """An argument of a function is of a wrong type."""


class UsageError(SpmdError):
    """A command line is invalid, or names something that does not exist. Reported in one line, with exit code 2."""


@contextmanager
def nothing_swallowed() -> Generator[None]:
    """A context for calling a traced function: the first exception of this package that the function caught is raised at its end.

    An exception that the function raises itself takes precedence, unless one that it caught requests a retrace (`TraceAgain`,
    `DroppedValueError`).
    """
    raised: list[Exception] = []
    token = noted.set(raised)
    try:
        yield
    except Exception as error:
        again = next((e for e in raised if isinstance(e, (TraceAgain, DroppedValueError))), None)
        if again is None or isinstance(error, (TraceAgain, SpmdError)):
            raise
        raise again from error
    finally:
        noted.reset(token)
    if raised:
        raise raised[0]


@contextmanager
def dropped(*kinds: type[Exception]) -> Generator[None]:
    """A context that ends at an exception of these kinds, which a traced function never sees."""
    raised: list[Exception] | None = noted.get()
    num_before = len(raised or ())
    try:
        yield
    except kinds:
        if raised is not None:
            raised[num_before:] = [error for error in raised[num_before:] if isinstance(error, TraceAgain)]


def text_of(error: BaseException) -> str:
    """The texts among the arguments of an exception. `str(error)` would run code of the user's, and print tensors that have no values."""
    args: tuple[Any, ...] = vars(BaseException)["args"].__get__(error)
    parts = (text_of(arg) if isinstance(arg, BaseException) else arg for arg in args)
    return " ".join(part for part in parts if isinstance(part, str))


def shown(value: object) -> str:
    """A value of a wrong type in an error: "3", "'w'", "a Tensor", "the module Linear", "the class Linear"."""
    if isinstance(value, type):
        return f"the class {value.__name__}"
    if isinstance(value, torch.nn.Module):
        return f"the module {type(value).__name__}"
    return repr(value) if value is None or isinstance(value, int | float | str) else f"a {type(value).__name__}"


def user_line() -> str:
    """`file:line in function` of the innermost frame outside of this package and of installed libraries; empty without such a frame."""
    frame = sys._getframe(1)
    while frame is not None:
        filename = frame.f_code.co_filename
        if not _is_library(filename):
            return f"{os.path.basename(filename)}:{frame.f_lineno} in {frame.f_code.co_name}"
        frame = frame.f_back
    return ""


def line_of(error: BaseException) -> str:
    """`file:line in function` of the user's innermost frame in the traceback of `error`; empty without such a frame."""
    found, trace = "", error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        if not _is_library(code.co_filename):
            found = f"{os.path.basename(code.co_filename)}:{trace.tb_lineno} in {code.co_name}"
        trace = trace.tb_next
    return found


def place_of(traceback: Any) -> str:
    """The user's innermost line in the traceback that jax recorded for an operation; "in a library" without such a line."""
    for frame in getattr(traceback, "frames", ()):
        if not _is_library(frame.file_name):
            return f"called at {os.path.basename(frame.file_name)}:{frame.line_num} in {frame.function_name}"
    return "in a library"


def called_at() -> Iterable[str]:
    """A detail line for `message` that names the user's call; empty without a frame of the user on the stack."""
    line = user_line()
    return [f"called at {line}"] if line else []


def _is_library(filename: str) -> bool:
    return filename.startswith((_HERE, _TORCH, "<")) or "/site-packages/" in filename or "/lib/python3" in filename
