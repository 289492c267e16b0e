"""`Pending`: a value that Python computes when a call ends, by a function of its own of numbers that only the device knows.

log.append(round(loss.item(), 4))       # the trace appends a Pending: (round, (loss, 4)); every call appends round() of its number

A `Pending` can be stored, returned, and passed to other functions of Python, which gives another `Pending`. So the values, their types
and their texts are Python's. It has no value during the trace: a branch on it, or its use as a size, is refused by name.

Which functions give one is decided in `_pending_calls`; `_pending_texts` has those of f-strings, and `_pending_outputs` what is printed.
"""

from __future__ import annotations

import builtins
import collections
import math
import operator
import os.path
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from spmd.base._branches import catches
from spmd.base._errors import TraceError, called_at, message, user_line
from spmd.device._host_copies import HostCopy
from spmd.device._numbers import is_of_host, is_program_number, sample
from spmd.program.reads._library import is_library, starts_trace
from spmd.program.reads._nested import inside
from spmd.program.reads._noted_sizes import is_noted
from spmd.program.reads._number_place import ABSENT
from spmd.program.reads._places import PLAIN
from spmd.program.reads._text_functions import is_of_texts
from spmd.program.reads._varying import Varying

_MAY_RAISE = (ValueError, ArithmeticError, LookupError)  # what a function of numbers raises, apart from a TypeError, which the trace raises
_NEVER_RAISE = frozenset(
    (
        *(builtins.min, builtins.max, builtins.sorted, builtins.str, builtins.repr, builtins.ascii, builtins.format, builtins.abs),
        *(builtins.float, builtins.bool, builtins.len, builtins.sum, math.isnan, math.isinf, math.isfinite, math.fabs, math.copysign),
        *(operator.add, operator.sub, operator.mul, operator.neg, operator.pos, operator.abs, operator.not_, operator.truth),
        *(operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge),
    )
)
_OF_KNOWN_LENGTH = frozenset((builtins.divmod, math.modf, math.frexp))
_MOST_ELEMENTS = 65_536  # largest array of numpy whose copy a program keeps
_OF_TYPE = ("dtype", "ndim", "shape", "size", "itemsize", "nbytes")  # attributes of numpy's values that do not depend on numbers
_OF_ARRAYS = (  # methods that change nothing
    *("tolist", "item", "mean", "sum", "std", "var", "min", "max", "prod", "argmax", "argmin", "astype", "round", "copy", "reshape", "T"),
)
_METHODS_OF = (bool, int, float, complex, str, bytes, np.generic)


class NotTaken(Exception):
    """An argument that no `Pending` can keep: an object that may change before the call ends."""


class Slot(NamedTuple):
    """The place of a number in the arguments of a `Pending`."""

    position: int


def _items_of(value: Any) -> Any:
    kind = type(value)
    if kind is dict:
        return value.values()
    return value if kind in (list, collections.deque) or isinstance(value, tuple) else None


def parts_in(value: Any) -> Iterator[Any]:
    """The numbers of the program, varying numbers and pending values in it, also in lists, tuples, deques and dicts."""
    return (part for part in inside(value, _items_of) if type(part) is Pending or type(part) is Varying or is_program_number(part))


def holds_copies(*values: Any) -> bool:
    """Whether the values contain a copy to the host of a traced tensor, also in lists, tuples, deques and dicts."""
    return any(type(part) is HostCopy for part in inside(values, _items_of))


def is_pending(*values: Any) -> bool:
    """Whether the values contain one that is pending."""
    return any(type(part) is Pending for value in values for part in parts_in(value))


def is_unknown(*values: Any) -> bool:
    """Whether the values contain a number that only the device knows, or a pending value.

    A number that the host knows from the inputs of the call counts as known; the program then gets a guard on it.
    """
    parts = [part for value in values for part in parts_in(value) if type(part) is not Varying]
    if any(type(part) is Pending for part in parts):
        return True
    ofdevice = sorted((part for part in parts if part.node.evaluate is None), key=lambda part: part.node.integral)
    return any(not is_of_host(part, asks=True) for part in ofdevice)  # floats first: they are seldom known, so nothing else is guarded


def is_made_late(recording: Any, *values: Any) -> bool:
    """Whether a text of these values is made when the call ends: a number in them is known only then, or varies."""
    if is_unknown(*values):
        return True
    is_late = not recording.has_constant_texts and any(type(part) is not Pending for value in values for part in parts_in(value))
    recording.has_late_texts |= is_late
    return is_late


def kept(value: Any, parts: list[Any], other: Callable[[Any], Any] | None = None) -> Any:
    """A copy of an argument, with a `Slot` for each number in it.

    Args:
        value: the argument.
        parts: gets the numbers.
        other: gives what stands for an object that is neither plain nor a container of such.

    Raises:
        NotTaken: it contains such an object, and there is no `other`.
    """
    return _kept(value, parts, other, {})


def _kept(value: Any, parts: list[Any], other: Callable[[Any], Any] | None, made: dict[int, Any]) -> Any:
    """The same. `made`: the copies of containers, by id of the original: one may be in itself."""
    kind: Any = type(value)
    if kind is Pending or kind is Varying or is_program_number(value):
        found = next((index for index, part in enumerate(parts) if part is value), len(parts))
        parts += [value] if found == len(parts) else []
        return Slot(found)
    if kind is HostCopy:
        parts.append(value)
        value.fix_for_end()
        return Slot(len(parts) - 1)
    if is_noted(value):
        return value.plain()
    if (copied := _copied(value, made, lambda item: _kept(item, parts, other, made))) is not ABSENT:
        return copied
    if isinstance(value, PLAIN) or (isinstance(value, type) and kind is type):
        return value
    array: Any = value
    if kind is np.ndarray and array.dtype != object and array.size <= _MOST_ELEMENTS:
        return array.copy()
    if other is None:
        raise NotTaken
    return other(value)


def filled(value: Any, values: Sequence[Any]) -> Any:
    """A copy of a kept argument with these numbers in its slots."""
    made: dict[int, Any] = {}

    def fill(value: Any) -> Any:
        if type(value) is Slot:
            return values[value.position]
        copied = _copied(value, made, fill)
        return value if copied is ABSENT else copied

    return fill(value)


def _copied(value: Any, made: dict[int, Any], copy_of: Callable[[Any], Any]) -> Any:
    """A container with copies of its items; ABSENT for any other value. `made`: the copies of those that may be in themselves, by id."""
    kind: Any = type(value)
    held: Any = value
    if kind in (tuple, set, frozenset):
        return kind(map(copy_of, value))
    if isinstance(value, tuple) and hasattr(kind, "_fields"):
        return kind(*map(copy_of, value))
    if kind not in (list, dict, collections.deque):
        return ABSENT
    if id(value) not in made:
        copied: Any = kind([], held.maxlen) if kind is collections.deque else kind()
        made[id(value)] = copied
        if kind is dict:
            copied.update((key, copy_of(item)) for key, item in held.items())
        else:
            copied.extend(map(copy_of, held))
    return made[id(value)]


class Pending:
    """A value that every call computes when it ends.

    Attributes:
        parts: the numbers that it is computed from: of the program, varying, or pending themselves.
        sample: a value of its type; ABSENT if the type depends on the numbers.
        title: names it in messages.
    """

    __slots__ = ("_fn", "_given", "_line", "_options", "parts", "sample", "title")
    __array_ufunc__ = None  # numpy's operators leave theirs to ours: they would make an array of objects

    def __init__(
        self, fn: Callable[..., Any], given: tuple[Any, ...], options: dict[str, Any], sampled: Any = None, other: Any = None
    ) -> None:
        """
        Args:
            fn, given, options: the function and its arguments.
            sampled: gives `sample`, where a call of `fn` with samples would not.
            other: see `kept`.

        Raises:
            NotTaken: an argument is an object that may change before the call ends.
            TypeError: `fn` does not take arguments of these types.
        """
        self.parts: list[Any] = []
        self._fn = fn
        self._given = kept(given, self.parts, other)
        self._options = kept(options, self.parts, other)
        self._line = user_line()
        self.title = _title(fn)
        self.sample = self._sampled() if sampled is None else sampled()

    def is_of_host(self) -> bool:
        """Whether the host knows all numbers in it when the call begins, as those of a text may be (`is_made_late`)."""
        return all(part.is_of_host() if type(part) is Pending else is_known_before(part) for part in self.parts)

    def computes(self) -> Callable[[Sequence[Any]], Any]:
        """The function that computes the value from those of `parts`. It does not refer to the parts of the trace."""
        fn, given, options, title, line = self._fn, self._given, self._options, self.title, self._line

        def compute(values: Sequence[Any]) -> Any:
            try:
                return fn(*filled(given, values), **filled(options, values))
            except Exception as error:
                error.add_note(f"{title} at {line}, computed when the call of the compiled function ended")
                raise

        return compute

    def _sampled(self) -> Any:
        samples = [sample_of(part) for part in self.parts]
        if any(value is ABSENT for value in samples):
            return ABSENT
        if _may_have_other_type(self._fn, samples):
            return ABSENT
        try:
            return self._fn(*filled(self._given, samples), **filled(self._options, samples))
        except TypeError:
            raise
        except Exception:  # of this value alone
            return ABSENT

    def __bool__(self) -> bool:
        raise self.needed("bool (a branch)")

    def __getattr__(self, name: str) -> Any:
        kind = type(self.sample)
        if name.startswith("__") or (self.sample is not ABSENT and not hasattr(kind, name)):
            raise AttributeError(f"'{kind.__name__}' object has no attribute '{name}'")
        if name in _OF_TYPE and isinstance(self.sample, (np.generic, np.ndarray)):
            return getattr(self.sample, name)
        if self.sample is ABSENT or not (issubclass(kind, _METHODS_OF) or (kind is np.ndarray and name in _OF_ARRAYS)):
            raise self.needed(f"value (for its attribute {name})")
        if callable(getattr(self.sample, name)):
            return PendingMethod(self, name)
        return pending(getattr, (self, name))

    def __copy__(self) -> Pending:
        return self

    def __deepcopy__(self, memo: Any) -> Pending:
        return self

    def needed(self, kind: str) -> TraceError:
        """The error for a value that Python needs during the trace."""
        return TraceError(
            message(
                f"{self.title} of a number of the device was needed as a Python {kind}",
                *called_at(),
                "Python computes it when the call ends; until then it can be stored, returned and passed to further functions of Python",
                fix="return it from the step and use it there, or compute it on the device: torch.where(loss > 1, a, b), loss.sqrt()",
            )
        )


def is_known_before(part: Any) -> bool:
    return type(part) is Varying or (is_program_number(part) and part.node.evaluate is not None)


def _type_of(value: Any) -> type:
    return type(value.sample) if type(value) is Pending else type(value)


class PendingMethod:
    """A method of a pending value."""

    __slots__ = ("_name", "_owner")

    def __init__(self, owner: Pending, name: str) -> None:
        self._owner, self._name = owner, name

    def __call__(self, *given: Any, **options: Any) -> Any:
        return pending(getattr(type(self._owner.sample), self._name), (self._owner, *given), options)


def sample_of(part: Any) -> Any:
    """A value of the type of a number, copy or pending value; ABSENT if that depends on numbers."""
    if type(part) is Pending:
        return part.sample
    if type(part) is HostCopy:
        return torch.zeros(tuple(part.shape), dtype=part.dtype)
    return part.evaluate() if type(part) is Varying else sample(part)


def pending(
    fn: Callable[..., Any], given: tuple[Any, ...], options: dict[str, Any] | None = None, sampled: Any = None, is_safe: bool = False
) -> Any:
    """`fn(*given, **options)` as a value that every call computes when it ends: a `Pending`, or a list or tuple of some.

    Args:
        fn, given, options: the function and its arguments.
        sampled: see `Pending`.
        is_safe: the function raises no error for other numbers.

    Raises:
        TraceError: an argument may change until then, or the function would handle the error of `fn`.
    """
    if not is_safe and fn not in _NEVER_RAISE and (line := catching(_MAY_RAISE)):
        raise _caught(_title(fn), line)
    try:
        made = Pending(fn, given, options or {}, sampled)
    except NotTaken:
        raise not_taken(_title(fn)) from None
    if made.is_of_host() and not (is_safe or fn in _NEVER_RAISE or is_of_texts(fn, tuple(map(_type_of, given)), given)):
        raise made.needed("value")  # for its error, which belongs to this line
    if type(made.sample) in (list, tuple) and (sampled is not None or fn in _OF_KNOWN_LENGTH):
        kind = type(made.sample)
        return kind([pending(operator.getitem, (made, i), None, lambda i=i: made.sample[i]) for i in range(len(made.sample))])
    return made


def item_of(holder: Any, key: Any) -> Pending:
    """`holder[key]` for a plain container and a key that only the device knows.

    Raises:
        TraceError: the items are objects, or of several classes.
    """
    items = list(holder.values()) if type(holder) is dict else holder
    return pending(operator.getitem, (holder, key), None, lambda: uniform(items, "an index"))


def has_items(holder: Any, key: Any) -> bool:
    """Whether `holder` is a container of Python or an array, and `key` is known only to the device."""
    is_plain = type(holder) in (list, tuple, dict, str, bytes, range) or (type(holder) is np.ndarray and holder.ndim == 1)
    return is_plain and (type(key) is Pending or (is_program_number(key) and is_unknown(key)))


def uniform(items: Any, title: str) -> Any:
    """A value of the class that all items have."""
    samples = [sample_of(item) if type(item) is Pending or is_program_number(item) else item for item in items]
    if not samples or len({type(value) for value in samples}) > 1 or samples[0] is None:
        raise not_taken(title)
    return samples[0]


def operand(recording: Any, left: Any, right: Any) -> Any:
    """The left operand to use, so that a pending value's class decides what the operator does."""
    if type(left) is Pending:
        if isinstance(right, torch.Tensor):
            raise left.needed("number (an operand beside a tensor)")
        return left
    if type(right) is Pending:
        if isinstance(left, torch.Tensor):
            raise right.needed("number (an operand beside a tensor)")
        return _itself(left)
    if (
        isinstance(left, (str, bytes)) and type(right) not in (str, bytes, int) and (is_made_late(recording, right) or holds_copies(right))
    ):  # "%.4f" % loss
        return _itself(left)
    is_numpys = isinstance(left, (np.generic, np.ndarray)) and type(left) is not np.float64
    if (is_numpys and is_program_number(right) and is_unknown(right)) or (
        isinstance(right, (np.generic, np.ndarray)) and type(right) is not np.float64 and is_program_number(left) and is_unknown(left)
    ):
        return _itself(left)
    return left


def _itself(value: Any) -> Pending:
    """A pending value that is `value`."""
    try:
        return Pending(_identity, (value,), {})
    except NotTaken:
        raise not_taken("an operator") from None


def _identity(value: Any) -> Any:
    return value


def not_taken(title: str) -> TraceError:
    """The error for an argument beside a number of the device that may change before the call ends."""
    return TraceError(
        message(
            f"{title} was called with a number of the device and an object that may change before the call ends",
            *called_at(),
            "Python computes it when the call ends, from numbers, texts, and lists, tuples and dicts of them",
            fix="pass plain values beside it, or return the number from the step: return loss.item()",
        )
    )


def _caught(title: str, line: str) -> TraceError:
    return TraceError(
        message(
            f"{title} was called with a number of the device, and the function handles the error that it may raise",
            *called_at(),
            f"Python computes it when the call ends, after the 'except' at {line}",
            fix="return the number from the step, return loss.item(), and handle the error there",
        )
    )


def catching(kinds: Sequence[type[Exception]]) -> str:
    """The line of the user's code that would handle an error of one of these classes in the call that it makes now; empty if none would."""
    frame: types.FrameType | None = sys._getframe(2)
    while frame is not None and not starts_trace(frame):
        if not is_library(frame.f_globals.get("__name__")) and catches(frame, kinds):
            return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def _title(fn: Any) -> str:
    if fn is _identity:
        return "a value"
    owner = getattr(fn, "__self__", None)
    name = getattr(fn, "__name__", type(fn).__name__)
    prefix = f"{owner.__name__.lstrip('_')}." if isinstance(owner, types.ModuleType) and owner is not builtins else ""
    return f"{prefix}{name}()"


def _may_have_other_type(fn: Any, samples: Sequence[Any]) -> bool:
    """Whether the type of the result depends on the numbers: of the least of an int and a float, of an int to a negative power."""
    if fn in (builtins.min, builtins.max):
        return len(set(map(type, samples))) > 1
    return fn in (operator.pow, builtins.pow) and all(isinstance(value, int) for value in samples)


def _binary(name: str, fn: Callable[[Any, Any], Any]) -> None:
    setattr(Pending, f"__{name}__", lambda self, other: pending(fn, (self, other)))
    setattr(Pending, f"__r{name}__", lambda self, other: pending(fn, (other, self)))


def _unary(name: str, fn: Callable[..., Any]) -> None:
    setattr(Pending, f"__{name}__", lambda self, *more: pending(fn, (self, *more)))


def _refused(name: str, kind: str) -> None:
    def refuse(self: Pending, *more: Any) -> Any:
        raise self.needed(kind)

    setattr(Pending, f"__{name}__", refuse)


def _in_place(self: Pending, other: Any) -> Any:
    if isinstance(self.sample, np.ndarray):
        raise self.needed("container (which an operator changes in place)")
    return NotImplemented


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "lshift", "rshift", "and_", "or_", "xor"):
    _binary(_name.rstrip("_"), getattr(operator, _name))
_binary("divmod", divmod)
for _name in ("eq", "ne", "lt", "le", "gt", "ge", "neg", "pos", "abs", "invert", "getitem"):
    _unary(_name, getattr(operator, _name))
for _name, _fn in {"round": round, "trunc": math.trunc, "floor": math.floor, "ceil": math.ceil}.items():
    _unary(_name, _fn)
for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "matmul"):
    setattr(Pending, f"__i{_name}__", _in_place)
for _name, _kind in {
    **{"index": "int (an index or a size)", "int": "int", "float": "float", "complex": "complex", "hash": "key (of a dict or set)"},
    **{"str": "string", "repr": "string", "format": "string", "len": "int (a length)", "iter": "sequence (to iterate over)"},
    **{"contains": "bool (a branch)", "setitem": "container", "delitem": "container", "reduce_ex": "value (to be pickled)"},
}.items():
    _refused(_name, _kind)

__all__ = [
    "NotTaken",
    "Pending",
    "PendingMethod",
    "catching",
    "filled",
    "has_items",
    "holds_copies",
    "is_known_before",
    "is_made_late",
    "is_pending",
    "is_unknown",
    "item_of",
    "kept",
    "not_taken",
    "operand",
    "parts_in",
    "pending",
    "sample_of",
    "uniform",
]
