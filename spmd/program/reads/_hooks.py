"""What instrumented code calls: each hook hands the operands to the recording of this thread, if there is one.

Hooks run a hundred thousand times in a trace: those that come most often turn back by themselves where there is nothing to tell.
"""

from __future__ import annotations

import sys
from _thread import get_ident
from collections.abc import Callable, Generator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch

from spmd.base._torch import DisableTorchFunction, num_torch_function_modes
from spmd.program.reads._journal import Writes
from spmd.program.reads._number_calls import identified, is_scalar, known, require_known_name
from spmd.program.reads._varying import NumbersNeeded, Varying

if TYPE_CHECKING:
    from spmd.program.reads._recorder import Recording

_now: dict[int, Recording] = {}  # by thread

# values that hold nothing that could change
QUIET = frozenset({int, float, bool, str, bytes, complex, type(None), tuple, torch.Size, torch.dtype, torch.device, slice, range})


def start(recording: Recording) -> Recording | None:
    """Let this thread's code tell `recording`; returns the one that it told before."""
    before = _now.get(get_ident())
    _now[get_ident()] = recording
    return before


def stop(before: Recording | None) -> None:
    """Go back to the recording `before`."""
    if before is None:
        _now.pop(get_ident(), None)
    else:
        _now[get_ident()] = before


def now() -> Recording | None:
    """What this thread's code tells; None while nothing is recorded, and while the recording itself looks at things."""
    recording = _now.get(get_ident())
    return None if recording is None or recording.is_busy else recording


@contextmanager
def python_writes() -> Generator[Writes]:
    """What is written to Python from here on, in the trace of this thread."""
    recording = _now.get(get_ident())
    with nullcontext(Writes()) if recording is None else recording.journal.part() as writes:
        yield writes


def unseen(recording: Recording, look: Callable[..., Any], *operands: Any) -> Any:
    """`look(*operands)`, seen by no hook, and by no mode of the user's that sees torch's functions."""
    recording.is_busy = True
    try:
        if num_torch_function_modes():
            with DisableTorchFunction():
                return look(*operands)
        return look(*operands)
    finally:
        recording.is_busy = False


def _teller(name: str) -> Callable[..., Any]:
    def tell(*operands: Any) -> None:
        recording = _now.get(get_ident())
        if recording is not None and not recording.is_busy:
            unseen(recording, getattr(recording, name), *operands)

    return tell


def _caller(name: str) -> Callable[..., Any]:
    def tell(fn: Any, *operands: Any) -> Any:
        recording = _now.get(get_ident())
        return fn if recording is None or recording.is_busy else unseen(recording, getattr(recording, name), fn, *operands)

    return tell


def _item(name: str) -> Callable[[Any, Any], tuple[Any, Any]]:
    def tell(holder: Any, key: Any) -> tuple[Any, Any]:
        recording = _now.get(get_ident())
        if recording is None or recording.is_busy:
            return key, holder
        return unseen(recording, getattr(recording, name), holder, key if type(key) in (int, str) else known(key))

    return tell


def _load_attr(instance: Any, name: str) -> None:
    if type(instance) not in QUIET:
        recording = _now.get(get_ident())
        if recording is not None and not recording.is_busy and (id(instance), name) not in recording.seen:
            unseen(recording, recording.load_attr, instance, name)
            if name == "__class__" and type(instance) is Varying:  # which is not the number's
                raise NumbersNeeded
            if name in ("__class__", "__doc__", "node"):
                require_known_name(instance, name)


def _entered(instance: Any, name: str) -> None:
    """A special method begins: Python looked it up in the class."""
    cls: Any = type(instance)
    cls = instance if issubclass(cls, type) else cls  # `isinstance` would ask the object for its class
    recording = _now.get(get_ident())
    if recording is not None and not recording.is_busy and (id(cls), name) not in recording.seen:
        unseen(recording, recording.load_attr, cls, name)


def _identify(left: Any, right: Any) -> Any:
    if not (isinstance(left, bool) or isinstance(right, bool)):
        return left
    recording = _now.get(get_ident())
    return left if recording is None or recording.is_busy else unseen(recording, identified, left, right)


def _look_into(value: Any) -> None:
    if type(value) not in QUIET:
        recording = _now.get(get_ident())
        if recording is not None and not recording.is_busy:
            unseen(recording, recording.look_into, value)


def _shown(value: Any) -> Any:
    """A value is about to be made text; returns what to show: a number of the program has no format of its own."""
    if type(value) in QUIET and type(value) is not tuple:
        return value
    recording = _now.get(get_ident())
    if recording is None or recording.is_busy:
        return value
    unseen(recording, recording.show, value)
    return known(value) if is_scalar(value) else value


def _load_cell(cell: Any, name: str) -> None:
    recording = _now.get(get_ident())
    if recording is not None and not recording.is_busy and id(cell) not in recording.seen:
        unseen(recording, recording.load_cell, cell, name)


def _load_global(name: str) -> None:
    recording = _now.get(get_ident())
    if recording is not None and not recording.is_busy:  # looking at an object may run its own `__getattribute__`
        variables = sys._getframe(1).f_globals
        if (id(variables), name) not in recording.seen:
            unseen(recording, recording.load_global, variables, name)


def _store_global(name: str) -> None:
    recording = _now.get(get_ident())
    if recording is not None and not recording.is_busy:
        unseen(recording, recording.store_global, sys._getframe(1).f_globals, name)


def _choice(condition: Any, enters_if: bool) -> Any:
    recording = _now.get(get_ident())
    return bool(condition) is enters_if if recording is None or recording.is_busy else recording.choose(condition, enters_if)


def _chosen(choice: Any, before: Any, after: Any) -> Any:
    recording = _now.get(get_ident())
    return after if choice is True or recording is None else recording.chosen(choice, before, after)


HOOKS: dict[str, Callable[..., Any]] = {
    **{name: _teller(name) for name in ("store_cell", "store_attr", "mutate", "iterate", "made_with_keys", "imported")},
    **{name: _item(name) for name in ("load_item", "store_item", "delete_item")},
    **{name: _caller(name) for name in ("call", "call_ex", "match_class", "as_key", "contains", "operate", "operate_in_place")},
    "load_attr": _load_attr,
    "entered": _entered,
    "identify": _identify,
    "look_into": _look_into,
    "shown": _shown,
    "load_cell": _load_cell,
    "load_global": _load_global,
    "store_global": _store_global,
    "choice": _choice,
    "chosen": _chosen,
    "super_of": lambda made_by, cls, instance: made_by(cls, instance),
}
