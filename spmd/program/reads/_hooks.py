"""The hooks that instrumented code calls. Each passes its operands to the recording of this thread, if there is one.

Hooks run a hundred thousand times in a trace. The most frequent ones return early by themselves when there is nothing to record.
"""

from __future__ import annotations

import sys
from _thread import get_ident
from collections.abc import Callable, Generator
from contextlib import contextmanager, nullcontext
from inspect import CO_ASYNC_GENERATOR, CO_COROUTINE, CO_GENERATOR
from types import CodeType
from typing import TYPE_CHECKING, Any

import torch

from spmd.base._torch import DisableTorchFunction, num_torch_function_modes
from spmd.device._deferred import calling
from spmd.program.reads._composed_functions import power_operand
from spmd.program.reads._journal import Writes
from spmd.program.reads._late_writes import LateElement, is_of_host
from spmd.program.reads._number_calls import identity_operand, known, require_known_name
from spmd.program.reads._number_objects import identical_number
from spmd.program.reads._number_operands import integer_operand
from spmd.program.reads._number_place import ABSENT
from spmd.program.reads._pending import Pending, has_items, item_of
from spmd.program.reads._pending_texts import f_string, formatted, joined
from spmd.program.reads._varying import NumbersNeeded, Varying

if TYPE_CHECKING:
    from spmd.program.reads._recorder import Recording

_now: dict[int, Recording] = {}  # by id of the thread
_apart: set[int] = set()  # ids of the threads that are in `run_apart`

# types of immutable values
QUIET = frozenset({int, float, bool, str, bytes, complex, type(None), tuple, torch.Size, torch.dtype, torch.device, slice, range, Pending})
_MAY_BE_PENDING = (tuple, Pending)
_SUSPENDED = CO_GENERATOR | CO_COROUTINE | CO_ASYNC_GENERATOR


def start(recording: Recording) -> Recording | None:
    """Record the code of this thread in `recording`. Returns the recording that was active before."""
    before = _now.get(get_ident())
    _now[get_ident()] = recording
    calling.set(_call_kernel)
    return before


def stop(before: Recording | None) -> None:
    """Make `before` the active recording of this thread again."""
    if before is None:
        calling.set(None)
        _now.pop(get_ident(), None)
    else:
        _now[get_ident()] = before


def now() -> Recording | None:
    """The active recording of this thread; None while nothing is recorded, and while the recording itself inspects objects."""
    recording = _now.get(get_ident())
    return None if recording is None or recording.is_busy else recording


@contextmanager
def python_writes() -> Generator[Writes]:
    """Collect the writes to Python objects in this block, in the trace of this thread."""
    recording = _now.get(get_ident())
    with nullcontext(Writes()) if recording is None else recording.journal.part() as writes:
        yield writes


def without_hooks(recording: Recording, fn: Callable[..., Any], *operands: Any) -> Any:
    """`fn(*operands)`, without hooks, and without the torch-function modes that the user has entered."""
    recording.is_busy = True
    try:
        if num_torch_function_modes():
            with DisableTorchFunction():
                return fn(*operands)
        return fn(*operands)
    finally:
        recording.is_busy = False


def run_apart(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """`fn(*args, **kwargs)`, which is no part of a trace: without hooks, and stubs run the original code of their functions."""
    ident = get_ident()
    if ident in _apart:
        return fn(*args, **kwargs)
    recording = _now.get(ident)
    was_busy = recording is None or recording.is_busy
    _apart.add(ident)
    try:
        if recording is not None:
            recording.is_busy = True
        return fn(*args, **kwargs)
    finally:
        if recording is not None:
            recording.is_busy = was_busy
        _apart.discard(ident)


def runs_original(code: CodeType) -> bool:
    """Whether a function that is called now runs its original code: nothing of this thread is recorded until it returns."""
    ident = get_ident()
    recording = _now.get(ident)
    if recording is None or ident in _apart:
        return True
    return recording.is_busy and not code.co_flags & _SUSPENDED  # a generator may be resumed later


def _call_kernel(kernel: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """`kernel(*args, **kwargs)` without hooks: jax's and our context managers are `contextlib`'s, which is instrumented."""
    recording = _now.get(get_ident())
    if recording is None or recording.is_busy:
        return kernel(*args, **kwargs)
    recording.is_busy = True
    try:
        return kernel(*args, **kwargs)
    finally:
        recording.is_busy = False


def _observing_hook(name: str) -> Callable[..., Any]:
    """A hook whose result instrumented code drops."""

    def hook(*operands: Any) -> None:
        recording = _now.get(get_ident())
        if recording is not None and not recording.is_busy:
            without_hooks(recording, getattr(recording, name), *operands)

    return hook


def _replacing_hook(name: str) -> Callable[..., Any]:
    """A hook that returns the value to use in the place of its first operand."""

    def hook(fn: Any, *operands: Any) -> Any:
        recording = _now.get(get_ident())
        return fn if recording is None or recording.is_busy else without_hooks(recording, getattr(recording, name), fn, *operands)

    return hook


def _item_hook(name: str) -> Callable[[Any, Any], tuple[Any, Any]]:
    """A hook that returns the key and the container to use."""

    def hook(holder: Any, key: Any) -> tuple[Any, Any]:
        recording = _now.get(get_ident())
        if recording is None or recording.is_busy:
            return key, holder
        is_as_given = type(key) in (int, str) or (name == "store_item" and is_of_host(holder))
        return without_hooks(recording, getattr(recording, name), holder, key if is_as_given else known(key))

    return hook


def _load_item(holder: Any, key: Any) -> tuple[Any, Any]:
    recording = _now.get(get_ident())
    if type(key) in (int, str) or recording is None or recording.is_busy or not has_items(holder, key):
        return _load_known_item(holder, key)
    without_hooks(recording, recording.read_content, holder)
    return 0, (item_of(holder, key),)


def _load_updated(holder: Any, key: Any) -> tuple[Any, Any]:
    """Before the item is read in `holder[key] += value`."""
    recording = _now.get(get_ident())
    if recording is None or recording.is_busy or not is_of_host(holder):
        return _load_item(holder, key)
    return 0, (without_hooks(recording, LateElement, recording, holder, key),)


def _load_attr(instance: Any, name: str) -> None:
    if type(instance) not in QUIET:
        recording = _now.get(get_ident())
        if recording is not None and not recording.is_busy and (id(instance), name) not in recording.seen:
            without_hooks(recording, recording.load_attr, instance, name)
            if name == "__class__" and type(instance) is Varying:  # its class is not the number's
                raise NumbersNeeded
            if name in ("__class__", "__doc__", "node") or type(instance) is torch.SymFloat:
                require_known_name(instance, name)


def _special_method(instance: Any, name: str) -> None:
    """At the start of a special method: record that Python looked it up in the class."""
    cls: Any = type(instance)
    cls = instance if issubclass(cls, type) else cls  # `isinstance` would read the object's `__class__`, which may be user code
    recording = _now.get(get_ident())
    if recording is not None and not recording.is_busy and (id(cls), name) not in recording.seen:
        without_hooks(recording, recording.load_attr, cls, name)


def _identity(left: Any, right: Any) -> Any:
    if left is None or right is None:
        return left
    recording = _now.get(get_ident())
    if recording is None or recording.is_busy:
        return left
    if isinstance(left, bool) or isinstance(right, bool):
        return without_hooks(recording, identity_operand, left, right)
    if type(left) is Varying or type(right) is Varying:
        return without_hooks(recording, identical_number, Varying, left, right)
    return recording.identical(left, right)


def _read_content(value: Any) -> None:
    if type(value) not in QUIET:
        recording = _now.get(get_ident())
        if recording is not None and not recording.is_busy:
            without_hooks(recording, recording.read_content, value)


def _test(value: Any) -> None:
    if type(value) not in QUIET:
        recording = _now.get(get_ident())
        if recording is not None and not recording.is_busy:
            without_hooks(recording, recording.test, value)


def _formatted(value: Any, spec: Any, conversion: int, is_part: bool) -> Any:
    """The text of one value of an f-string."""
    recording = _now.get(get_ident())
    if (
        recording is None
        or recording.is_busy
        or (type(value) in QUIET and type(value) not in _MAY_BE_PENDING and type(spec) is not Pending)
    ):
        return f_string(value, spec, conversion)
    without_hooks(recording, recording.read_text, value)
    return formatted(recording, value, spec, conversion, is_part)


def _joined(*parts: Any) -> Any:
    """The text of an f-string."""
    return joined(_now[get_ident()], *parts) if any(type(part) is not str for part in parts) else "".join(parts)


def _match_class(value: Any, cls: Any, names: tuple[str, ...], num_positional: int) -> Any:
    """Before `case cls(...)`: the value to match instead. Of a pending value only the class is known."""
    if type(value) is Pending:
        if num_positional or names or value.sample is ABSENT:
            raise value.needed("value (of a pattern)")
        value = value.sample
    return _match_known(value, cls, names, num_positional)


def _load_cell(cell: Any, name: str) -> None:
    recording = _now.get(get_ident())
    if recording is not None and not recording.is_busy and id(cell) not in recording.seen:
        without_hooks(recording, recording.load_cell, cell, name)


def _load_global(name: str) -> None:
    recording = _now.get(get_ident())
    if recording is not None and not recording.is_busy:  # busy: inspecting an object may run its `__getattribute__`
        variables = sys._getframe(1).f_globals
        if (id(variables), name) not in recording.seen:
            without_hooks(recording, recording.load_global, variables, name)


def _imported(module: str, level: int, names: tuple[str, ...] | None) -> None:
    recording = _now.get(get_ident())
    if recording is not None and not recording.is_busy:
        without_hooks(recording, recording.import_module, module, level, names, sys._getframe(1).f_globals.get("__package__"))


def _store_global(name: str) -> None:
    recording = _now.get(get_ident())
    if recording is not None and not recording.is_busy:
        without_hooks(recording, recording.store_global, sys._getframe(1).f_globals, name)


def _power(left: Any, right: Any) -> Any:
    return power_operand(_operate(left, right), right)


def _choice(condition: Any, enters_if: bool) -> Any:
    recording = _now.get(get_ident())
    return bool(condition) is enters_if if recording is None or recording.is_busy else recording.choose(condition, enters_if)


def _chosen(choice: Any, before: Any, after: Any) -> Any:
    recording = _now.get(get_ident())
    return after if choice is True or recording is None else recording.chosen(choice, before, after)


_load_known_item = _item_hook("load_item")
_operate = _replacing_hook("operate")
_match_known = _replacing_hook("match_class")
HOOKS: dict[str, Callable[..., Any]] = {
    **{name: _observing_hook(name) for name in ("store_cell", "store_attr", "delete_attr", "mutate", "iterate", "made_with_keys")},
    **{name: _item_hook(name) for name in ("store_item", "delete_item")},
    "load_item": _load_item,
    "load_updated": _load_updated,
    **{name: _replacing_hook(name) for name in ("call", "call_ex", "as_key", "as_hash", "contains", "compare", "operate_in_place")},
    "operate": _operate,
    "power": _power,
    "invert": lambda value: integer_operand(value, 0),  # outside of a trace no value is a number of a program
    "match_class": _match_class,
    "load_attr": _load_attr,
    "special_method": _special_method,
    "identity": _identity,
    "read_content": _read_content,
    "formatted": _formatted,
    "joined": _joined,
    "test": _test,
    "load_cell": _load_cell,
    "load_global": _load_global,
    "store_global": _store_global,
    "imported": _imported,
    "choice": _choice,
    "chosen": _chosen,
    "super_of": lambda made_by, cls, instance: made_by(cls, instance),
}
