"""The exceptions of `spmd`, the tree of all exceptions, and the user's line for their messages.

    Noted                                              heard of even when a traced function catches it
    +-- SpmdError                                      base of every error that users meet
    |   +-- MeshError (ValueError)                     mesh: a mesh, spec or device request is invalid
    |   |   +-- SpecError                              mesh: a PartitionSpec does not fit its mesh or its tensor
    |   |   |   +-- RulesError                         mesh: rules for a model leave something suspicious
    |   |   |   +-- PlacementError                     DTensor placements that lay out no such tensor
    |   |   |       +-- NoSuchDimError (IndexError)
    |   |   |       +-- UnreducedError (NotImplementedError)
    |   |   +-- DeviceError (RuntimeError)             mesh: too few devices, or asked for too late
    |   +-- JobError (RuntimeError)                    mesh: the processes of a job do not come together, or do not agree
    |   |   +-- ServiceLost                            process 0, or the way to it, is gone
    |   +-- UnsupportedOpError (NotImplementedError)   an ATen op without a lowering
    |   +-- TraceError (RuntimeError)                  Python needed a value that only the compiled program has
    |   |   +-- Untraceable                            a graph of Dynamo's that is no program
    |   +-- DroppedValueError (RuntimeError)           a tensor whose value the compiled program did not keep
    |   |   +-- StaleGradients                         a gradient of an earlier call was added to: the step is traced again
    |   +-- NonFiniteError (FloatingPointError)        a module's output was not finite (compile(debug_nans=True))
    |   +-- CheckFailed                                a check that a compiled function makes of values; also of the class it raises
    |   +-- ShardError (RuntimeError)                  pieces of a tensor do not make one up
    |   +-- DeviceSlotError (RuntimeError)             another package already owns PyTorch's PrivateUse1 device
    |   +-- CheckpointError (RuntimeError)             a checkpoint could not be written, is damaged, or does not fit
    |   +-- UsageError                                 a command line makes no sense; one line
    |   +-- GroupError (RuntimeError)                  a process group that one program does not have
    |   +-- RecipeError (ValueError)                   a recipe that no run can follow
    |   +-- PeerError                                  a contender of a benchmark failed
    |   +-- AnnotationError (RuntimeError)             torch_xla's errors, where programs rely on them
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
    +-- TraceAgain                                     no error: the trace starts again, otherwise
        +-- UnequalCounters                            ... with counters lifted
        +-- AttributesNeeded                           ... with attributes of tensors in the signature of a call
        +-- NumbersNeeded                              ... with Python numbers as constants
        +-- CountsNeeded                               ... with integers that the host knows as Python's own
        +-- ContextNeeded                              ... in a copy of the context
        +-- ViewNeeded                                 ... with indices of tensors as constants
        +-- OptimizerAsObject                             ... with an optimizer as an object like any other
        +-- StateBeforeStep                               ... with an optimizer's state made by its first step, and not before
        +-- Undiscovered                                  ... with a module or optimizer that was not found before
        +-- NewContainerTypes                                 ... with objects recognised as containers
    Exception                                          neither: always caught by ours
    +-- _StateComplete                                 an optimizer has all its state
    +-- NotALoop                                       equations that repeat and cannot be one loop
    +-- Now                                            an operation that cannot wait for the end of its step
    +-- _LoweredText                                   a program was lowered to be read, and not to run
    +-- NoDigest                                       a traced program whose text does not say all of it
    +-- Inexact                                        what padding would change is in the way of one program for several sizes
        +-- SizeDecides                                ... Python goes another way for another size
        +-- Unknown                                    ... a number is no known function of the sizes
    +-- NotCompiled                                    a call of generate that runs in the loop of transformers
    +-- InMember                                       mesh: leaves the launcher's frames in a forked process
    ValueError
    +-- ExportedProgramError                           of the file that `spmd.export` writes, which runs without spmd
    UserWarning
    +-- AcceleratorIdle                                mesh: virtual devices were asked for beside a real accelerator

Those marked `mesh` are in `mesh`, on the floor below.
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
    """Not an error: the trace goes on no further and starts again, otherwise. Seen by nobody outside."""

    def other_settings(self, settings: Any) -> Any:
        """The `spmd.program.trace._trace_settings.TraceSettings` to trace with then, where it was `settings`."""
        raise NotImplementedError


class UnsupportedOpError(SpmdError, NotImplementedError):
    """An ATen op was called on the device that has neither a lowering nor a decomposition."""


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


class UsageError(SpmdError):
    """A command line makes no sense, or names what is not there: one line, and exit code 2."""


@contextmanager
def nothing_swallowed() -> Generator[None]:
    """Around a function that is traced: what it caught of ours is raised when it ends, the first of them.

    An exception of its own that it raises instead passes, unless what it caught only asks for another trace.
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


def place_of(traceback: Any) -> str:
    """The user's innermost line in a traceback that jax kept of an operation; "in a library" if there is none."""
    for frame in getattr(traceback, "frames", ()):
        if not _is_library(frame.file_name):
            return f"called at {os.path.basename(frame.file_name)}:{frame.line_num} in {frame.function_name}"
    return "in a library"


def called_at() -> Iterable[str]:
    """The detail line that names the user's own call, or nothing when no user frame is on the stack."""
    line = user_line()
    return [f"called at {line}"] if line else []


def _is_library(filename: str) -> bool:
    return filename.startswith((_HERE, _TORCH, "<")) or "/site-packages/" in filename or "/lib/python3" in filename
