"""Writes to CPU tensors and arrays from before the call with values that only the device knows: done when a call ends, in every call.

history[i] = loss.item(); total += loss.detach().cpu(); counts.index_add_(0, labels.cpu(), ones)

A call does them in order, with Python's own functions on the tensor itself, so its contents are no part of the program. Nothing may read
the memory after such a write: it has its values when the call ends. If a trace writes to a CPU tensor with values that the host knows
(`count += 1`), it starts again, and all writes to CPU tensors wait for the end of the call.
"""

from __future__ import annotations

import inspect
import operator
import sys
import types
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.lib.array_utils import byte_bounds

from spmd.base._errors import TraceAgain, TraceError, called_at, message, user_line
from spmd.base._torch import set_grad_enabled
from spmd.device._host_copies import HostCopy
from spmd.device._storage import is_device_tensor
from spmd.program.reads._heap import made_in_trace
from spmd.program.reads._journal import Effect
from spmd.program.reads._number_calls import known
from spmd.program.reads._number_place import ABSENT
from spmd.program.reads._pending import NotTaken, Pending, filled, holds_copies, is_unknown, not_taken, parts_in, sample_of

if TYPE_CHECKING:
    from spmd.program.reads._recorder import Recording

_TENSORS = (torch.Tensor, torch.nn.Parameter)
_MOST_CHECKED = 1 << 20  # elements of the largest tensor on a copy of which a trace does a write, to see its errors
_NO_VALUES = frozenset(("requires_grad_", "rename_", "set_", "detach_"))  # change no values
_DONE = object()  # the value of `holder[key]` after `holder[key] += value`, which waits
_OPERATORS = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "lshift", "rshift")
_OPERATOR_FUNCTIONS = tuple(getattr(operator, f"i{name}") for name in _OPERATORS if hasattr(operator, f"i{name}"))
_IN_PLACE = frozenset(f"__i{name}__" for name in _OPERATORS)


class _Itself:
    """Stands for the tensor or array that is written to, among the other arguments of a write."""


class LateWritesNeeded(TraceAgain):
    """A CPU tensor was written while the function was traced: trace again, with all such writes at the end of the call."""

    def other_settings(self, settings: Any) -> Any:
        return replace(settings, has_late_writes=True)


@dataclass(frozen=True)
class _Write:
    """One write.

    Attributes:
        fn: the function; its first argument is the tensor or array.
        holder, title: the tensor or array, and its name in messages.
        given: the other arguments.
        is_graph: whether gradients are computed where it was called.
        line: the user's line.
    """

    fn: Callable[..., Any]
    holder: Any
    title: str
    given: Pending
    is_graph: bool
    line: str

    def __call__(self, arguments: tuple[tuple[Any, ...], dict[str, Any]]) -> None:
        given, options = arguments
        try:
            with _inference(self.holder):
                before = torch.is_grad_enabled()
                set_grad_enabled(self.is_graph)
                try:
                    self.fn(self.holder, *(self.holder if value is _Itself else value for value in given), **options)
                finally:
                    set_grad_enabled(before)
        except Exception as error:
            error.add_note(f"a write to {self.title} at {self.line}, done when the call of the compiled function ended")
            raise


class LateWrites:
    """The writes of one trace that every call does when it ends.

    Attributes:
        takes_all: all writes to CPU tensors wait, not only those to known ones and those with values of the device.
        known: ids of the CPU tensors that the function can reach.
        is_stacked: the arguments of a call are stacks of those of the trace.
    """

    def __init__(self) -> None:
        self.takes_all = self.is_stacked = False
        self.known = frozenset[int]()
        self._writes: list[_Write] = []
        self._written: dict[tuple[int, int], str] = {}  # by memory, from its first byte up to the one after its last: a title

    def takes(self, recording: Recording, holder: Any, *values: Any) -> bool:
        """Whether a write of `values` to `holder` waits for the end of the call."""
        if not is_of_host(holder) or any(is_device_tensor(value) and type(value) is not HostCopy for value in values):
            return False
        is_tensor = isinstance(holder, torch.Tensor)
        if is_tensor and holder.requires_grad and torch.is_grad_enabled():  # torch raises
            return False
        if (is_tensor and id(holder) in self.known) or any(write.holder is holder for write in self._writes):
            return True
        if holds_copies(*values) or is_unknown(*values):
            return True
        return is_tensor and self.takes_all and not (made_in_trace(holder) and _older_with_memory_of(recording, holder) is None)

    def note(self, recording: Recording, fn: Callable[..., Any], holder: Any, *given: Any, **options: Any) -> Any:
        """Note `fn(holder, *given, **options)`. Returns the holder.

        Raises:
            TraceError: no call can do it when it ends.
        """
        title = recording._title(holder)
        if title == type(holder).__name__:  # one without a name
            title = f"{'an array' if isinstance(holder, np.ndarray) else 'a CPU tensor'} of shape {tuple(holder.shape)}"
        if recording.journal.is_in_part or self.is_stacked:
            where = "with steps_per_call" if self.is_stacked else "in the body of a branch or loop, or in a micro-batch"
            raise _refused(f"writes to {title}, which is on the CPU, {where}", "a call does such a write once, when it ends")
        given = tuple(_Itself if value is holder else value for value in given)
        for value in (*given, *options.values()):
            recording.read_deep(value)
        try:
            made = Pending(_arguments, given, options, lambda: None, _copy_of_host)
        except NotTaken:
            raise not_taken(f"a write to {title}") from None
        _check(fn, holder, made)
        recording.ask_identity(holder)
        recording._passed.clear()  # what is passed again is read again
        recording._copied.clear()
        self._written.setdefault(_memory(holder), title)
        self._writes.append(_Write(fn, holder, title, made, torch.is_grad_enabled(), user_line()))
        return holder

    def require_unread(self, value: Any) -> None:
        """Check that memory which is read has not been written before.

        Raises:
            TraceError: it has; it gets its values when the call ends.
        """
        if not self._written or not isinstance(value, (np.ndarray, torch.Tensor)) or not is_of_host(value):
            return
        start, end = _memory(value)
        for (first, last), title in self._written.items():
            if start < last and first < end:
                raise _refused(f"reads {title} after writing to it in place", "a call writes to tensors on the CPU when it ends")

    def effects(self, recording: Recording) -> list[Effect]:
        """The writes, for each call to do.

        Raises:
            TraceError: the trace has made what is written to.
        """
        for write in self._writes:
            if not recording.is_before(write.holder):
                raise _not_from_before(recording, write)
        return [Effect(write, ABSENT, write.title, ABSENT, write.given, write) for write in self._writes]


def _older_with_memory_of(recording: Recording, tensor: torch.Tensor) -> Any:
    """A tensor from before the trace, which it has read, on the storage of `tensor`; None if there is none."""
    if tensor._base is not None:
        return tensor._base
    first = tensor.untyped_storage().data_ptr()
    holders = (place.holder for place in recording.places.values())
    shared = (h for h in holders if is_of_host(h) and isinstance(h, torch.Tensor) and h.untyped_storage().data_ptr() == first)
    return next((h for h in shared if h is not tensor and not made_in_trace(h)), None)


def _not_from_before(recording: Recording, write: _Write) -> TraceError:
    """The error for a write to what the trace has made."""
    older = _older_with_memory_of(recording, write.holder) if isinstance(write.holder, torch.Tensor) else None
    if older is not None:
        why = "a call does such writes when it ends, to tensors by their own names"
        fix = "write to the tensor itself, t[1:] = value, or keep it on the device: .to('jax')"
        return TraceError(message(f"the compiled function writes to a view of a CPU tensor, at {write.line}", why, fix=fix))
    kind = "an array" if isinstance(write.holder, np.ndarray) else "a CPU tensor"
    why = "the program does not compute what the function makes on the host"
    return _refused(f"writes a value of the device into {kind} that it has made, at {write.line}", why)


class LateItems:
    """Takes the place of a tensor or array of the host in `holder[key] = value`."""

    __slots__ = ("_holder", "_otherwise", "_recording")

    def __init__(self, recording: Recording, holder: Any, otherwise: Callable[[Any], tuple[Any, Any]]) -> None:
        """`otherwise` gives, for a key, the key and the container of a write that does not wait."""
        self._recording, self._holder, self._otherwise = recording, holder, otherwise

    def __setitem__(self, key: Any, value: Any) -> None:
        late, holder = self._recording.late, self._holder
        if value is _DONE:
            return
        value, kept = _copied(value, holder), _kept_key(key)
        if late.takes(self._recording, holder, kept, value):
            _set_late(self._recording, holder, key, value)
        else:
            self._recording.read_content(holder)  # by which the write is found
            key, target = self._otherwise(known(key))
            target[key] = value


class _LateOperand:
    """Takes the place of a tensor or array of the host on the left of `holder += value` and the like."""

    def __init__(self, recording: Recording, holder: Any) -> None:
        self._recording, self._holder = recording, holder

    def _updated(self, do: Callable[[Any, Any], Any], value: Any) -> Any:
        return self._recording.late.note(self._recording, do, self._holder, value)


class LateElement(_LateOperand):
    """Takes the place of an element of such a tensor or array in `holder[key] += value` and the like."""

    def __init__(self, recording: Recording, holder: Any, key: Any) -> None:
        super().__init__(recording, holder)
        recording.read_key(key)
        self._key, self._kept = key, _kept_key(key)
        is_known = not holds_copies(self._kept) and not any(True for _ in parts_in(self._kept))
        self._element = holder[key] if is_known else ABSENT

    def _updated(self, do: Callable[[Any, Any], Any], value: Any) -> Any:
        recording, holder, key = self._recording, self._holder, self._key
        if recording.late.takes(recording, holder, self._kept, value):
            recording.late.note(recording, partial(_update, do), holder, self._kept, value)
            return _DONE
        key, container = recording.load_item(holder, known(key))
        element = container[key] if self._element is ABSENT else self._element
        return do(recording.operate_in_place(element, value), value)


def _define(name: str) -> None:
    do = getattr(operator, f"i{name}" if hasattr(operator, f"i{name}") else f"i{name}_")
    setattr(_LateOperand, f"__i{name}__", lambda self, value: self._updated(do, value))


for _name in _OPERATORS:
    _define(_name)


def late_operand(recording: Recording, left: Any, right: Any) -> Any:
    """What takes the place of `left` in `left += right` and the like if the write waits for the end of the call; else None."""
    if isinstance(left, LateElement):
        return left
    return _LateOperand(recording, left) if recording.late.takes(recording, left, right) else None


def late_method(recording: Recording, fn: Any, args: tuple[Any, ...]) -> Callable[..., Any] | None:
    """The callable for a call that writes to a CPU tensor or array if the write waits for the end of the call; else None.

    That is a method, as in `total.add_(copy)`, or a function of numpy, as in `np.add.at(counts, index, 1)`.
    """
    kind = type(fn)
    if kind is types.MethodDescriptorType:  # torch.Tensor.add_(total, copy)
        chosen = late_method(recording, fn.__get__(args[0]), args[1:]) if args and is_of_host(args[0]) else None
        return None if chosen is None else lambda _, *given, **options: chosen(*given, **options)
    if kind is types.MethodWrapperType and fn.__name__ == "__setitem__" and len(args) == 2:  # total.__setitem__(0, copy)
        chosen = late_method(recording, operator.setitem, (fn.__self__, *args))
        return None if chosen is None else partial(chosen, fn.__self__)
    if fn is operator.setitem and len(args) == 3 and is_of_host(args[0]):
        kept, value = _kept_key(args[1]), _copied(args[2], args[0])
        return partial(_set_late, recording) if recording.late.takes(recording, args[0], kept, value) else None
    is_at = kind is types.BuiltinFunctionType and type(fn.__self__) is np.ufunc and fn.__name__ == "at"
    if (is_at or fn is np.copyto or any(fn is each for each in _OPERATOR_FUNCTIONS)) and args and is_of_host(args[0]):
        return partial(recording.late.note, recording, fn) if recording.late.takes(recording, *args) else None
    if kind is not types.BuiltinFunctionType or not is_of_host(owner := fn.__self__) or not _writes(fn.__name__, type(owner)):
        return None
    copied = partial(_copied, holder=owner) if fn.__name__ == "copy_" else _itself
    do = getattr(type(owner), fn.__name__)
    if not recording.late.takes(recording, owner, *map(copied, args)):
        return None
    return lambda *given, **options: recording.late.note(recording, do, owner, *map(copied, given), **options)


def with_out(recording: Recording, fn: Any, given: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """The array that a call of a function of numpy writes to and returns, noted for the end of the call; ABSENT if it writes to none.

    Raises:
        TraceError: it writes to what is no array of the host.
    """
    position = fn.nin if isinstance(fn, np.ufunc) else _position_of_out(fn) if len(given) > 1 else len(given)
    out = options.get("out", given[position : position + 1])
    out = out[0] if isinstance(out, tuple) and len(out) == 1 else out
    if out is None or (isinstance(out, tuple) and not out):
        return ABSENT
    if not is_of_host(out):
        raise not_taken(f"numpy.{fn.__name__}(out=...)")
    rest = {name: value for name, value in options.items() if name != "out"}
    return recording.late.note(recording, partial(_into, fn), out, *given[:position], **rest)


@cache
def _position_of_out(fn: Any) -> int:
    """The position of `out` among the arguments of a function; more than any function has if there is none."""
    try:
        names = list(inspect.signature(fn).parameters)
    except (TypeError, ValueError):  # it is in C and has none
        names = []
    return names.index("out") if "out" in names else sys.maxsize


def _into(fn: Callable[..., Any], out: Any, *given: Any, **options: Any) -> None:
    fn(*given, out=out, **options)


def with_late_writes(effects: list[Effect], recording: Recording) -> list[Effect]:
    """The writes of a trace, followed by those that every call does when it ends."""
    return [*effects, *recording.late.effects(recording)]


class _Slice(NamedTuple):
    """A slice whose bounds may be numbers that vary."""

    start: Any
    stop: Any
    step: Any


def _kept_key(key: Any) -> Any:
    if isinstance(key, slice):
        return _Slice(key.start, key.stop, key.step)
    return tuple(map(_kept_key, key)) if type(key) is tuple else key


def _key_of(kept: Any) -> Any:
    if type(kept) is _Slice:
        return slice(*kept)
    return tuple(map(_key_of, kept)) if type(kept) is tuple else kept


def _set_late(recording: Recording, holder: Any, key: Any, value: Any) -> None:
    recording.late.note(recording, _set, holder, _kept_key(key), _copied(value, holder))


def _set(holder: Any, key: Any, value: Any) -> None:
    holder[_key_of(key)] = value


def _update(do: Callable[[Any, Any], Any], holder: Any, key: Any, value: Any) -> None:
    """`holder[key] += value`, for the operator `do`."""
    key = _key_of(key)
    holder[key] = do(holder[key], value)


@cache
def _writes(name: str, kind: type) -> bool:
    """Whether a method writes values, and neither draws random numbers nor changes the shape."""
    if issubclass(kind, np.ndarray):
        return name == "fill"
    if name in _IN_PLACE:
        return True
    if not name.endswith("_") or name.startswith("_") or name in _NO_VALUES:
        return False
    packet = getattr(torch.ops.aten, name, None)
    found = [] if packet is None else [getattr(packet, each) for each in packet.overloads()]
    tags = {tag for each in found for tag in each.tags}
    return bool(found) and not tags & {torch.Tag.inplace_view, torch.Tag.nondeterministic_seeded}


def is_of_host(value: Any) -> bool:
    """Whether it is a dense tensor on the CPU, which has memory, or an array of numbers."""
    if type(value) is np.ndarray:
        return value.dtype.kind in "biufc"
    return type(value) in _TENSORS and value.is_cpu and value.layout == torch.strided and not value.is_nested


def _itself(value: Any) -> Any:
    return value


def _copied(value: Any, holder: Any) -> Any:
    """A copy to the host of a device tensor that is copied into a CPU tensor; any other value itself."""
    return value.cpu() if isinstance(holder, torch.Tensor) and is_device_tensor(value) and type(value) is not HostCopy else value


def _copy_of_host(value: Any) -> Any:
    """A copy of what a write takes from the host."""
    if not is_of_host(value):
        raise NotTaken
    return value.copy() if isinstance(value, np.ndarray) else value.detach().clone()


def _memory(value: Any) -> tuple[int, int]:
    """The addresses of its first byte, and of the one after its last. Of a tensor, those of its storage."""
    if isinstance(value, np.ndarray):
        return byte_bounds(value)
    storage = value.untyped_storage()
    return storage.data_ptr(), storage.data_ptr() + storage.nbytes()


def _inference(holder: Any) -> Any:
    return torch.inference_mode() if isinstance(holder, torch.Tensor) and holder.is_inference() else nullcontext()


def _arguments(*given: Any, **options: Any) -> tuple[Any, dict[str, Any]]:
    return given, options


def _check(fn: Callable[..., Any], holder: Any, made: Pending) -> None:
    """Do a write on a copy, with values of the same types, to raise what it raises for these types, shapes and known indices."""
    samples = [sample_of(part) for part in made.parts]
    size = holder.size if isinstance(holder, np.ndarray) else holder.numel()
    if size > _MOST_CHECKED or any(value is ABSENT for value in samples):
        return
    copied = _copy_of_host(holder)
    given, options = filled(made._given, samples), filled(made._options, samples)
    fn(copied, *(copied if value is _Itself else value for value in given), **options)


def _refused(what: str, why: str) -> TraceError:
    fix = "keep it on the device: .to('jax'), or write to it after the call"
    return TraceError(message(f"the compiled function {what}", *called_at(), why, fix=fix))


__all__ = [
    "LateElement",
    "LateItems",
    "LateWrites",
    "LateWritesNeeded",
    "is_of_host",
    "late_method",
    "late_operand",
    "with_late_writes",
    "with_out",
]
