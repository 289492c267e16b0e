"""Which functions of Python and numpy give a pending value when they are called with numbers that only the device knows.

log.append(round(loss.item(), 4)); json.dumps({"loss": loss.item()}); names[x.argmax().item()]

A function that has an equivalent on the device (`abs`, `math.exp`, `max` of two floats) stays an operation of the program. One that prints
is done when the call ends (`_pending_outputs`). Any other function that is given a pending value is refused.
"""

from __future__ import annotations

import array
import builtins
import collections
import datetime
import decimal
import fractions
import functools
import io
import itertools
import json
import math
import operator
import statistics
import string
import types
from collections.abc import Callable, Collection
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from spmd.base._convert import host_tensor
from spmd.device._copy import needs_host_value
from spmd.device._host_answers import host_answer
from spmd.device._host_copies import computed_on_host, held_of, is_argument, is_host_copy, method_of, not_a_parameter, with_memory
from spmd.device._numbers import OF_MATH, is_program_number
from spmd.device._storage import is_device_tensor, load
from spmd.program.reads._hidden_state import IN_MEMORY
from spmd.program.reads._hooks import without_hooks
from spmd.program.reads._late_writes import with_out
from spmd.program.reads._nested import inside
from spmd.program.reads._number_calls import needs_known
from spmd.program.reads._number_place import ABSENT
from spmd.program.reads._numpy_numbers import is_elementwise
from spmd.program.reads._pending import (
    Pending,
    PendingMethod,
    catching,
    filled,
    holds_copies,
    is_made_late,
    is_pending,
    is_unknown,
    item_of,
    kept,
    not_taken,
    parts_in,
    pending,
    sample_of,
    uniform,
)
from spmd.program.reads._pending_outputs import is_captured, is_output_call, note_position, noted_output, require_no_output
from spmd.program.reads._pending_texts import text_method
from spmd.program.reads._varying import NumbersNeeded, Varying

if TYPE_CHECKING:
    from spmd.program.reads._recorder import Recording

_BUILTINS = (
    *("abs", "ascii", "bin", "bool", "chr", "complex", "divmod", "float", "format", "hex", "int", "len", "max", "min", "oct", "ord", "pow"),
    *("repr", "round", "sorted", "str", "sum"),
)
_OPERATIONS = (
    *("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "neg", "pos", "abs", "lshift", "rshift", "and_", "or_", "xor", "invert"),
    *("eq", "ne", "lt", "le", "gt", "ge", "not_", "truth", "getitem"),
)
_OF_NUMPY = (
    *("array", "asarray", "mean", "sum", "std", "var", "median", "average", "min", "max", "amin", "amax", "nanmean", "nansum", "prod"),
    *("percentile", "quantile", "round", "around", "clip", "isclose", "allclose", "argmax", "argmin", "argsort", "sort", "cumsum", "diff"),
    *("stack", "concatenate", "nan_to_num", "linalg.norm"),
)
_CLASSES = (decimal.Decimal, fractions.Fraction, datetime.timedelta)
_PURE = {
    *(id(getattr(builtins, name)) for name in _BUILTINS),
    *(id(fn) for fn in vars(math).values() if callable(fn)),
    *(id(getattr(operator, name)) for name in _OPERATIONS),
    *(id(fn) for name in statistics.__all__ if isinstance(fn := getattr(statistics, name), types.FunctionType)),
    *(id(operator.attrgetter(name)(np)) for name in _OF_NUMPY),
    *map(id, (json.dumps, *_CLASSES)),
}
_ON_DEVICE = {
    *(id(getattr(math, name)) for name in ("floor", "ceil", "trunc", "isnan", "isinf", "isfinite", *OF_MATH)),
    *(
        id(getattr(operator, name))
        for name in _OPERATIONS
        if name not in ("not_", "truth", "getitem", "lshift", "rshift", "and_", "or_", "xor")
    ),
    *map(id, (abs, divmod, sum)),
}
_OF_ITEMS = set(map(id, (max, min, sum, sorted, math.fsum, math.prod)))  # of all items of a list
# these compute from what the containers among their arguments hold; the others take containers as they are
_OF_CONTENT = _OF_ITEMS | {
    *map(id, (str, repr, ascii, json.dumps, math.dist)),
    *(id(getattr(statistics, name)) for name in statistics.__all__),
    *(id(operator.attrgetter(name)(np)) for name in _OF_NUMPY),
}
_MOST_LISTED = 64  # elements of a tensor that `tolist` makes numbers of the program: each is an output of it
_TEXTS = set(map(id, (builtins.str, builtins.repr, builtins.ascii, builtins.format)))
_NUMPYS = {id(operator.attrgetter(name)(np)) for name in _OF_NUMPY}
# functions whose C++ code reads memory of CPU tensors: their positions and names among the arguments
_READ_IN_C: dict[str, tuple[tuple[int, ...], tuple[str, ...]]] = {
    "tensor_split": ((1,), ("indices_or_sections", "tensor_indices_or_sections", "indices", "sections")),
    "ctc_loss": ((2, 3), ("input_lengths", "target_lengths")),
    **dict.fromkeys(("lstm", "gru", "rnn_tanh", "rnn_relu"), ((1,), ("batch_sizes",))),
}
_MAY_BE_ELSEWHERE = (1, "targets")  # of these functions' arguments: targets of `ctc_loss` on the CPU
_TAKE_VARYING = ("torch", "numpy")
_OF_CLASSES = (TypeError, ValueError, AttributeError, RecursionError)  # what a function raises for an object that is no number
_VIEWS = tuple(type(getattr({}, name)()) for name in ("keys", "values", "items"))
_ITERATED = (types.GeneratorType, map, filter, zip, *_VIEWS)
_MAKE_BYTES = (bytes, bytearray, array.array)


def is_pure(fn: Any) -> bool:
    """Whether `fn` computes a value of Python from numbers and texts, without other effects."""
    if id(fn) in _PURE:
        return True
    owner = getattr(fn, "__self__", None)
    if type(owner) in (str, bytes):
        return True
    if type(owner) is dict:
        return fn.__name__ == "get"
    return is_elementwise(fn)


def for_pending(
    recording: Recording, fn: Any, args: tuple[Any, ...], stores: Callable[[Any], bool], record: Callable[..., Any]
) -> Callable[..., Any] | None:
    """The callable to use instead of `fn`, with its reads recorded, if it gives a pending value; None for other calls.

    Args:
        recording, fn, args: the call.
        stores: whether a function only stores what it is given, or is instrumented.
        record: records a call without numbers of the device.

    Raises:
        TraceError: `fn` needs the value of an argument that is pending.
    """
    if hasattr(type(fn), "__getattr__"):
        return None  # an object of the user's, which is called without asking it
    if is_output_call(fn) and not is_captured(recording, fn, args):
        return noted_output(recording, fn, args, record)
    owner: Any = getattr(fn, "__self__", None)
    if issubclass(type(owner), IN_MEMORY):
        require_no_output(recording, fn, args)
    elif isinstance(owner, io.IOBase):
        note_position(recording, fn)
    if fn is builtins.type and len(args) == 1 and is_host_copy(args[0]):
        return lambda value: value.__class__
    if (made := _of_copies(recording, fn, owner, args)) is not None:
        return made
    if getattr(fn, "__name__", "") == "tolist" and is_device_tensor(held_of(owner)):
        return partial(_list_of, held_of(owner).detach())
    if fn is builtins.map and args and is_pure(args[0]) and any(map(_may_be_unknown, args[1:])):
        for items in args[1:]:
            recording.iterate(items)
        return lambda applied, *items: map(partial(_applied, recording, applied), *items)
    if (made := _of_template(recording, fn, owner, args)) is not None:
        return made
    _require_errors_seen(fn, args, stores)
    if not is_pure(fn):
        return _for_others(fn, args, stores)
    is_of_content = id(fn) in _OF_CONTENT or type(getattr(fn, "__self__", None)) in (str, bytes)
    if args and type(args[0]) in _ITERATED and (id(fn) in _OF_ITEMS or getattr(fn, "__name__", "") == "join"):
        recording.iterate(args[0])
        return partial(_of_all, recording, fn)
    if fn in (builtins.str, builtins.repr) and len(args) == 1 and text_method(args[0], 1 + (fn is repr)) is not None:
        recording.read_text(args[0])
        return lambda value: text_method(value, 1 + (fn is repr))(value)  # type: ignore[misc]
    makes_text = id(fn) in _TEXTS or type(owner) is str or (fn is operator.mod and _is_text(args))
    is_any = is_of_content or makes_text or (args and _is_text(args))
    taken = args if is_any else tuple(arg for arg in args if type(arg) is Pending or is_program_number(arg))
    if not any(map(_may_be_unknown, taken)) or _stays_on_device(fn, args):
        return None
    if not (is_made_late(recording, *taken) if makes_text else is_unknown(*taken)):
        return None
    for arg in args:
        _read(recording, arg)
    if type(owner) is dict:
        recording.read_content(owner)
        return partial(_looked_up, owner)
    # a float is rounded to digits without an error, and to an int with one for nan
    is_safe = fn is builtins.round and len(args) == 2 and type(args[1]) is int and args[1] >= 0
    return _INSTEAD.get(id(fn)) or partial(_computed, recording, fn, is_safe)


def _of_copies(recording: Recording, fn: Any, owner: Any, args: tuple[Any, ...]) -> Callable[..., Any] | None:
    """The callable for a function that makes a text or an array of a copy to the host; None for other calls."""
    if fn is torch.nn.Parameter and holds_copies(*args):
        raise not_a_parameter()
    if args and is_host_copy(args[0]) and (own := method_of(fn)) is not None:
        return own
    is_array = id(fn) in _NUMPYS or is_elementwise(fn)
    if is_array and any(map(is_argument, args)):
        raise computed_on_host(f"numpy.{fn.__name__}()")
    if fn is torch.Tensor.numpy and args and is_device_tensor(args[0]):
        return _forced
    if isinstance(owner, torch.Tensor) and (name := getattr(fn, "__name__", "")) in ("numpy", "__array__"):
        if is_device_tensor(owner) and name == "numpy":
            return partial(_forced, owner)
        if is_host_copy(owner) and not is_argument(owner):
            return partial(_array_of, owner) if name == "numpy" else partial(_as_array, owner)
    if (read := _READ_IN_C.get(getattr(fn, "__name__", ""))) is not None and holds_copies(*args):
        positions, names = read
        return partial(_with_memory, fn, {*names, *(p - isinstance(owner, torch.Tensor) for p in positions)})
    if not (id(fn) in _TEXTS or type(owner) in (str, bytes) or fn is operator.mod or is_array):
        return None
    if not holds_copies(*args) or (fn is operator.mod and not _is_text(args)) or (fn is builtins.format and not args[0].dim()):
        return None
    for arg in args:
        _read(recording, arg)
    return partial(_computed, recording, fn, id(fn) in _TEXTS)


def substitute(template: str, /, *given: Any, **named: Any) -> str:
    """`string.Template(template).substitute(...)`."""
    return string.Template(template).substitute(*given, **named)


def safe_substitute(template: str, /, *given: Any, **named: Any) -> str:
    """`string.Template(template).safe_substitute(...)`."""
    return string.Template(template).safe_substitute(*given, **named)


def _of_template(recording: Recording, fn: Any, owner: Any, args: tuple[Any, ...]) -> Callable[..., Any] | None:
    """The callable for a method of `string.Template` that gives a pending text; None for other calls."""
    made = {"substitute": substitute, "safe_substitute": safe_substitute}.get(getattr(fn, "__name__", ""))
    if made is None or type(owner) is not string.Template:
        return None
    recording.load_attr(owner, "template")
    text: Any = owner.template
    if not (is_made_late(recording, text, *args) or holds_copies(*args)):
        return None
    for arg in args:
        _read(recording, arg)

    def substituted(*given: Any, **named: Any) -> Any:
        text_made = pending(made, (text, *given), named, is_safe=True)
        if text_made.sample is ABSENT:
            parts: list[Any] = []
            copies = kept(((text, *given), named), parts)
            if all(sample_of(part) is not ABSENT for part in parts):
                args, options = filled(copies, [sample_of(part) for part in parts])
                made(*args, **options)  # raises the error of a wrong template at its line
        return text_made

    return substituted


def _computed(recording: Recording, fn: Any, is_safe: bool, /, *given: Any, **options: Any) -> Any:
    """`fn(*given, **options)`, computed when the call ends."""
    is_numpys = isinstance(fn, np.ufunc) or id(fn) in _NUMPYS
    if is_numpys and (out := with_out(recording, fn, given, options)) is not ABSENT:
        return out
    return pending(fn, given, options, is_safe=is_safe)


def _with_memory(fn: Any, places: Collection[int | str], *args: Any, **options: Any) -> Any:
    """`fn(*args, **options)`, which reads the memory of the tensors at `places` in C++."""
    name = fn.__name__

    def given(place: int | str, value: Any) -> Any:
        if place in places:
            return with_memory(value, name)
        return held_of(value) if place in _MAY_BE_ELSEWHERE and args and is_device_tensor(args[0]) else value

    return fn(*(given(i, value) for i, value in enumerate(args)), **{key: given(key, value) for key, value in options.items()})


def _array_of(copy: Any, *, force: bool = False) -> Any:
    """`copy.numpy()`: the memory of the tensor that a call makes of the copy."""
    if copy.requires_grad and not force:
        raise RuntimeError("Can't call numpy() on Tensor that requires grad. Use tensor.detach().numpy() instead.")
    if (known := host_answer(load(copy.held))) is not None:
        return host_tensor(np.array(known)).numpy()
    return pending(torch.Tensor.numpy, (copy.detach() if force else copy,), {"force": force} if force else None, is_safe=True)


def _as_array(copy: Any, dtype: Any = None) -> Any:
    """`copy.__array__(dtype)`."""
    array = _array_of(copy)
    return array if dtype is None else array.astype(dtype, copy=False)


def _forced(tensor: torch.Tensor, *, force: bool = False) -> Any:
    """`tensor.numpy(force=True)` of a device tensor, which C++ would make of memory that a traced copy does not have."""
    return _array_of(tensor.detach().cpu().resolve_conj().resolve_neg()) if force else tensor.numpy()


def _is_text(args: tuple[Any, ...]) -> bool:
    """Whether it is `operator.mod(text, ...)` or the like."""
    return type(args[0]) in (str, bytes)


def _may_be_unknown(arg: Any) -> bool:
    return type(arg) not in (str, int, float, bool) and any(True for _ in parts_in(arg))


def _for_others(fn: Any, args: tuple[Any, ...], stores: Callable[[Any], bool]) -> Callable[..., Any] | None:
    """The callable for a function that asks for the class of a pending value; None if no argument is pending, or `fn` stores it."""
    found = next((arg for arg in args if type(arg) is Pending), None)
    if found is None:
        if needs_known(fn) and is_pending(*args):
            raise not_taken(getattr(fn, "__name__", "a function"))
        return None
    if fn is builtins.isinstance or (fn is builtins.type and len(args) == 1):
        return lambda value, *kinds: fn(_sample(value), *kinds)
    if any(fn is asks for asks in _ASK_OBJECT) or type(fn) is PendingMethod or stores(fn):
        return None
    raise found.needed(f"value (an argument of {getattr(fn, '__name__', type(fn).__name__)})")


def _content_of(value: Any) -> Any:
    if isinstance(value, dict):
        return dict.values(value)
    return value if type(value) in (list, set, collections.deque, *_VIEWS) or isinstance(value, tuple) else None


def _require_errors_seen(fn: Any, args: tuple[Any, ...], stores: Callable[[Any], bool]) -> None:
    """Check that an error of a library's function for numbers that vary in containers among its arguments would leave the trace.

    Raises:
        NumbersNeeded: the user's code would handle it, though the function takes plain numbers.
    """
    module = str(getattr(fn, "__module__", "")).partition(".")[0]
    is_python = type(fn) in (types.FunctionType, types.MethodType) and module not in _TAKE_VARYING
    if not (is_python or any(fn is make for make in _MAKE_BYTES)):
        return
    held = (part for arg in args if type(arg) is not Varying for part in inside(arg, _content_of))
    if any(type(part) is Varying for part in held) and not stores(fn) and catching(_OF_CLASSES):
        raise NumbersNeeded


def _sample(value: Pending) -> Any:
    if value.sample is ABSENT:
        raise value.needed("class")
    return value.sample


def _read(recording: Recording, value: Any) -> None:
    """Record what a function of Python reads of an argument: the contents of its containers."""
    seen: set[int] = set()
    waiting = [value]
    while waiting:
        part = waiting.pop()
        if type(part) in (list, dict, tuple) and id(part) not in seen:
            seen.add(id(part))
            recording.read_content(part)
            waiting += part.values() if type(part) is dict else part


def _of_all(recording: Recording, fn: Any, items: Any, *rest: Any, **options: Any) -> Any:
    """`fn` of a generator or a view: of the list of its items. Tensors are computed one by one, as on the CPU."""
    items = iter(items)
    listed = list(itertools.islice(items, 1))
    if listed and isinstance(listed[0], torch.Tensor):
        return fn(itertools.chain(listed, items), *rest, **options)
    listed += items
    called = without_hooks(recording, recording.call, fn, listed, *rest, *options.values())
    return called(listed, *rest, **options)


def _applied(recording: Recording, fn: Any, *given: Any) -> Any:
    """A call of `fn` by a function in C."""
    return without_hooks(recording, recording.call, fn, *given)(*given)


def _looked_up(owner: dict[Any, Any], key: Any, *default: Any) -> Any:
    """`owner.get(key, default)` for a key that only the device knows."""
    if not default or default[0] is None:  # a value that may be None would have to be compared with None
        raise not_taken("get() without a default")
    return pending(dict.get, (owner, key, *default), None, lambda: uniform([*owner.values(), *default], "get()"))


def _sorted(items: Any, **options: Any) -> Any:
    """`sorted(items)`: a list of as many pending values."""
    if options.get("key") is not None:
        raise not_taken("sorted() with a key")
    samples = [sample_of(part) if type(part) is Pending or is_program_number(part) else part for part in items]
    is_uniform = len(set(map(_classes, samples))) == 1
    return pending(sorted, (items,), options, lambda: samples[:1] * len(samples) if is_uniform else [ABSENT] * len(samples))


def _classes(value: Any) -> Any:
    return tuple(map(_classes, value)) if type(value) is tuple else type(value)


def _stays_on_device(fn: Any, args: tuple[Any, ...]) -> bool:
    """Whether the program computes `fn` of these numbers itself."""
    if any(isinstance(arg, torch.Tensor) for arg in args):
        return True
    if is_pending(*args):
        return False
    numbers = args[0] if len(args) == 1 and type(args[0]) in (list, tuple) else args
    kinds = {_kind_of(number) for number in numbers}
    if not kinds <= {int, float, bool}:
        return False
    if fn in (builtins.min, builtins.max):
        return len(kinds) == 1
    if fn in (builtins.float, builtins.int, builtins.pow):
        return len(args) == (2 if fn is builtins.pow else 1) and type(args[0]) is not torch.SymBool
    return id(fn) in _ON_DEVICE and (len(args) == 1 or getattr(fn, "__module__", "") != "math")


def _kind_of(number: Any) -> type:
    """The type that a number has in Python."""
    if is_program_number(number):
        return number.node.kind
    return type(number.evaluate()) if type(number) is Varying else type(number)


def _list_of(tensor: torch.Tensor) -> Any:
    """`tensor.tolist()` of a device tensor."""
    if (known := host_answer(load(tensor))) is not None:
        return host_tensor(np.array(known)).tolist()
    if tensor.numel() > _MOST_LISTED:
        raise needs_host_value(f".tolist() of {tensor.numel()} values")
    return _listed(tensor)


def _listed(tensor: torch.Tensor) -> Any:
    """`tensor.tolist()` of a tensor that only the device knows: numbers of the program."""
    return tensor.item() if not tensor.dim() else list(map(_listed, tensor.unbind()))


def _truth(value: Any) -> Any:
    """`bool(value)`."""
    if type(value) is Pending:
        return pending(bool, (value,))
    return value if value.node.kind is bool else value != 0


_INSTEAD: dict[int, Callable[..., Any]] = {id(sorted): _sorted, id(bool): _truth, id(operator.truth): _truth, id(operator.getitem): item_of}
_ASK_OBJECT = (builtins.id, builtins.hasattr, builtins.getattr, builtins.callable, functools.partial, builtins.vars)


__all__ = ["for_pending", "is_pure"]
