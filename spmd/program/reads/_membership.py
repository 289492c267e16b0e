"""`number in container`, `table.get(number)`, `listed.index(number)` and the like: one program per answer, not per varying number.

    if step in milestones: ...           # as in torch's MultiStepLR, with a Counter
    weight = schedule.get(step, 1.0)

The container is guarded like any other that is read.
"""

from __future__ import annotations

import collections
import operator
import types
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from spmd.program.reads._container_methods import note_method
from spmd.program.reads._places_read import is_simple
from spmd.program.reads._varying import Varying, evaluation

if TYPE_CHECKING:
    from spmd.program.reads._recorder import Recording

_CONTAINERS = (dict, set, frozenset, list, tuple, collections.deque, range, type({}.keys()))
_ORDERED = (list, tuple, collections.deque, range)
_SEARCHES = (operator.countOf, operator.indexOf, operator.contains)
_SEARCH_METHODS = ("index", "count", "remove", "__contains__")
_PLAIN = (int, float, bool, str, bytes, type(None))


def membership_key(recording: Recording, item: Any, holder: Any) -> Any:
    """Before `item in holder`: record the read. Returns the item to use instead."""
    if type(item) is Varying:
        recording.read_content(holder)
        return _as_member(item, holder)
    if recording.given and isinstance(holder, (list, tuple, collections.deque)):
        recording.ask_identity(item)
        for read in (item, holder):
            recording.read_content(read)
        same = (recording.identical(item, other) for other in tuple(holder) if type(other).__eq__ is object.__eq__)
        return next((found for found in same if found is not item), item)
    recording.read_key(item)
    if isinstance(holder, dict) and is_simple(item) and type(holder).__contains__ is dict.__contains__:
        if not recording._is_ignored(holder) and not recording.journal.is_written(holder, item):
            title = f"{recording._title(holder)}[{{!r}}]"
            recording._dict(holder, title).present.setdefault(item, dict.__contains__(holder, item))
    elif type(holder) in (set, frozenset):  # without a question about its order
        recording._content(holder)
    else:
        recording.read_content(holder)
    return item


def lookup(recording: Recording, fn: Any, args: tuple[Any, ...]) -> Callable[..., Any] | None:
    """The callable to use instead of `fn`, if it looks a number up in a container of plain values and numbers; else None."""
    if len(args) == 2 and type(args[1]) is Varying and any(fn is f for f in _SEARCHES) and _is_of_numbers(args[0]):
        recording.read_content(args[0])
        return lambda items, number: _searched(fn, items, number)
    number = args[0] if args else None
    if type(number) is not Varying:
        return None
    table: Any = getattr(fn, "__self__", None)
    name = getattr(fn, "__name__", "")
    kind = _kind_of(table)
    if kind is not None and name == "__contains__" and (key := membership_key(recording, number, table)) is not number:
        return lambda _: fn(key)
    if kind in _ORDERED and name in _SEARCH_METHODS and getattr(type(table), name) is getattr(kind, name, None) and _is_of_numbers(table):
        note_method(recording, table, name, (number.evaluate(),))
        recording.read_content(table)
        if name == "remove":
            return lambda number: operator.delitem(table, _searched(_position_to_remove, table, number).concrete())
        return lambda number, *bounds: _searched(getattr(kind, name), table, number, *bounds)
    if not (isinstance(table, dict) and type(fn) is types.BuiltinFunctionType and fn.__name__ == "get"):
        return None
    key = membership_key(recording, number, table)
    if key is number:
        return None
    if key in table:
        number.concrete()
    return lambda _, *default: fn(key, *default)


def _searched(fn: Callable[..., Any], table: Any, number: Varying, *bounds: Any) -> Any:
    """`fn(table, number, *bounds)` for a search of numbers, as a value that every call computes. Equal objects are equal, also NaNs."""
    if isinstance(table, range):
        return number.apply(partial(fn, table), number, *bounds)
    parts, kind = [None if item is number else evaluation(item) for item in table], _kind_of(table)
    search = lambda value, *ends: fn(kind(value if part is None else part() for part in parts), value, *ends)  # noqa: E731
    try:
        return number.apply(search, number, *bounds)
    except ValueError as error:
        if repr(number.evaluate()) in str(error):
            number.concrete()
        raise


def _position_to_remove(items: Any, number: Any) -> int:
    position = items.index(number) if number in items else 0
    items.remove(number)  # raises if there is none
    return position


def _is_of_numbers(table: Any) -> bool:
    """Whether it is a list, tuple, deque or range of plain values and numbers that vary."""
    kind = _kind_of(table)
    return kind in _ORDERED and (kind is range or all(type(item) is Varying or type(item) in _PLAIN for item in table))


def _kind_of(holder: Any) -> Any:
    return next((cls for cls in _CONTAINERS if isinstance(holder, cls)), None)


def _is_plain(holder: Any, kind: Any) -> bool:
    """Whether a container of this kind holds only plain values."""
    return kind is range or all(type(member) in _PLAIN for member in holder)


def _as_member(number: Varying, holder: Any) -> Any:
    """The number's value in this call. The program is valid for all numbers with the same answer to `number in holder`.

    Returns the number itself if the container has its own `__contains__`, or holds other values than plain ones.
    """
    kind = _kind_of(holder)
    if kind is None or type(holder).__contains__ is not kind.__contains__ or not _is_plain(holder, kind):
        return number
    evaluate, members = number.evaluate, holder if kind is range else frozenset(holder)
    value = evaluate()
    number.guard(lambda: evaluate() in members, value in members)
    return value


__all__ = ["lookup", "membership_key"]
