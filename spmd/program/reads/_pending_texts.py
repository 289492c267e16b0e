"""f-strings and other texts of numbers that only the device knows, or that vary: Python makes them when a call ends.

log.append(f"step {i}: {loss.item():.4f}")

The hooks of their instructions call `formatted` for each value and `joined` for the whole text. A number that varies from call to call is
a part of the pending text without a guard on its value. If the function then fails, it may be because it needs a text of such numbers. It
is traced again, and the texts have the numbers of this call, which are guarded.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from spmd.base._errors import TraceAgain, TraceError
from spmd.device._host_copies import HostCopy, held_of
from spmd.device._numbers import is_program_number
from spmd.device._storage import is_device_tensor
from spmd.program.reads._library import is_recorded
from spmd.program.reads._number_calls import known
from spmd.program.reads._number_place import ABSENT
from spmd.program.reads._output_code import OutputsAtOnce
from spmd.program.reads._pending import Pending, holds_copies, is_made_late, pending, sample_of
from spmd.program.reads._varying import Varying
from spmd.sharding._tensor import XLAShardedTensor

if TYPE_CHECKING:
    from spmd.program.reads._recorder import Recording
    from spmd.program.trace._trace_settings import TraceSettings

_CONVERSIONS: dict[int, Callable[[Any], str]] = {1: str, 2: repr, 3: ascii}


class TextsNeeded(TraceAgain):
    """The function failed after a text was left to the end of the call: trace again with texts that are made at once."""

    def other_settings(self, settings: TraceSettings) -> TraceSettings:
        return replace(settings, has_constant_texts=True)


@contextmanager
def texts_needed(recording: Recording) -> Generator[None]:
    """A context for calling a traced function.

    Raises:
        OutputsAtOnce: output that was left to the end of the call cannot wait.
        TextsNeeded: the function failed after a text was left to the end of the call.
    """
    try:
        yield
    except Exception as error:
        if recording.journal.puts_off and recording.journal.outputs and isinstance(error, TraceError):
            raise OutputsAtOnce from error
        if recording.has_late_texts and not isinstance(error, TraceAgain):
            raise TextsNeeded from error
        raise


class Later(NamedTuple):
    """A number in an f-string, which becomes text when the whole text is known to be pending or not."""

    value: Any
    spec: Any
    conversion: int


def f_string(value: Any, spec: Any, conversion: int) -> Any:
    """The text of one value of an f-string. `conversion`: 1, 2, 3 for `!s`, `!r`, `!a`; `spec`: None if it is only converted."""
    converted = _CONVERSIONS[conversion](value) if conversion else value
    return converted if spec is None or (type(converted) is str and not spec) else format(converted, spec)


def text_method(value: Any, conversion: int = 1) -> Callable[[Any], Any] | None:
    """The method of the user's class that makes an object a text, which may be pending; None if there is none.

    Args:
        value: the object.
        conversion: 1 for `str()`, 2 for `repr()`, 0 for a format without a specification.
    """
    cls: Any = type(value)
    if conversion == 0 and cls.__format__ is not object.__format__:
        return None
    method = cls.__repr__ if conversion == 2 or cls.__str__ is object.__str__ else cls.__str__
    return method if type(method) is types.FunctionType and is_recorded(method.__module__) else None


def join(*parts: str) -> str:
    """The text of these parts."""
    return "".join(parts)


def formatted(recording: Recording, value: Any, spec: Any, conversion: int, is_part: bool) -> Any:
    """The text of one value of an f-string in a trace: pending if only the device knows the value.

    Args:
        recording: the recording of the trace.
        value, spec, conversion: see `f_string`.
        is_part: the text is a part of a longer one, so a number may wait as a `Later`.
    """
    if (
        type(value) in (torch.Tensor, XLAShardedTensor, HostCopy)
        and not conversion
        and not value.dim()
        and is_device_tensor(held_of(value))
    ):
        value = value.item()  # as `Tensor.__format__`
    if type(spec) is not Pending and is_part and (type(value) is Varying or is_program_number(value)):
        return Later(value, spec, conversion)
    has_spec = type(spec) is Pending or bool(spec)
    if (conversion or not has_spec) and (method := text_method(value, conversion)) is not None:
        return formatted(recording, method(value), spec, 0, is_part) if has_spec else method(value)
    if type(spec) is Pending or is_made_late(recording, value) or holds_copies(value):
        if type(value) in (list, tuple, dict):
            recording.read_deep(value)
        return _pending(value, spec, conversion)
    return f_string(known(value) if is_program_number(value) else value, spec, conversion)


def joined(recording: Recording, *parts: Any) -> Any:
    """The text of these parts in a trace."""
    later = [part.value for part in parts if type(part) is Later]
    if any(type(part) is Pending for part in parts) or is_made_late(recording, *later):
        return pending(join, tuple(_pending(*part) if type(part) is Later else part for part in parts), is_safe=True)
    return "".join(
        f_string(known(part.value) if is_program_number(part.value) else part.value, *part[1:]) if type(part) is Later else part
        for part in parts
    )


def _pending(value: Any, spec: Any, conversion: int) -> Any:
    if (
        type(spec) is not Pending
        and (is_program_number(value) or type(value) in (Pending, Varying))
        and (shown := sample_of(value)) is not ABSENT
    ):
        f_string(shown, spec, conversion)  # raises the error of a wrong format at its line
        return pending(f_string, (value, spec, conversion), is_safe=True)
    return pending(f_string, (value, spec, conversion))


__all__ = ["TextsNeeded", "f_string", "formatted", "joined", "text_method", "texts_needed"]
