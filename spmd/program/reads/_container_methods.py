"""Records calls of the methods in C of containers: which entries or contents they read and write."""

from __future__ import annotations

import array
import collections
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from spmd.program.reads._library import keeps_state

if TYPE_CHECKING:
    from spmd.program.reads._recorder import Recording

CONTAINERS = (dict, list, set, collections.deque, bytearray, array.array, np.ndarray)
_READERS = frozenset(  # methods of containers that change nothing
    (
        *("get", "keys", "values", "items", "copy", "index", "count", "union", "difference", "intersection", "issubset", "issuperset"),
        *("isdisjoint", "symmetric_difference", "__getitem__", "__contains__", "__iter__", "__len__", "__eq__", "__ne__", "__repr__"),
        *("__or__", "__and__", "__sub__", "__reversed__", "__sizeof__", "most_common", "fromkeys", "__reduce_ex__", "__class_getitem__"),
        *("__getattribute__", "__init_subclass__", "__class__", "__hash__", "__dir__", "__format__", "__str__"),
        *("decode", "hex", "startswith"),
    )
)
STORE = frozenset(("append", "appendleft", "insert", "extend", "update", "setdefault", "__setitem__"))  # only store arguments
_KEYED = frozenset(  # whose first argument is a key, or is searched for
    (
        *("get", "setdefault", "pop", "add", "discard", "remove", "index", "count", "fromkeys", "move_to_end"),
        *("__getitem__", "__setitem__", "__delitem__", "__contains__"),
    )
)
_BY_PLACE = frozenset(  # give or store items without a comparison of them
    (
        *("get", "keys", "values", "items", "copy", "pop", "popleft", "popitem", "clear", "reverse", "rotate", "add", "extendleft"),
        *("__getitem__", "__iter__", "__len__", "__init__", "__new__", "__reversed__"),
    )
)
# methods that read the whole content of their arguments
_TAKE_ALL = frozenset(f"{name}_update" for name in ("difference", "intersection", "symmetric_difference")) | {
    *("extend", "extendleft", "update", "subtract", "union", "intersection", "difference", "symmetric_difference", "join", "fromkeys"),
    *("issubset", "issuperset", "isdisjoint", "fromlist", "__init__", "__iadd__", "__ior__"),
}


def note_method(recording: Recording, owner: Any, name: str, args: tuple[Any, ...]) -> None:
    """Record a call of a container's own method in C: of a dict, list, set, deque, bytearray or array."""
    if name in _KEYED and args:
        recording.require_no_key(args[0])
        recording.ask_identity(args[0])
    if isinstance(owner, dict) and name in ("get", "__getitem__", "__contains__", "setdefault") and args:
        if name == "__contains__":
            recording.contains(args[0], owner)
        else:
            recording._read_item(owner, args[0]) if type(owner).__getitem__ is dict.__getitem__ else recording.read_content(owner)
        if name == "setdefault":
            recording._write_item(owner, args[0])
    elif isinstance(owner, dict) and name == "__setitem__":
        recording.journal.entry(owner, args[0], recording._title(owner))
    elif isinstance(owner, list) and name == "append":
        recording.journal.append(owner, args[0], list.append, recording._title(owner))
    elif isinstance(owner, list) and name == "extend" and type(args[0]) in (list, tuple) and args[0] is not owner:
        for item in args[0]:
            recording.journal.append(owner, item, list.append, recording._title(owner))
    elif isinstance(owner, collections.deque) and name == "append" and owner.maxlen is None:
        recording.journal.append(owner, args[0], collections.deque.append, recording._title(owner))
    elif isinstance(owner, set) and name == "add":
        recording.journal.append(owner, args[0], set.add, recording._title(owner))
    elif name in _READERS:
        recording.read_content(owner)
    elif name not in ("__init__", "__new__"):
        recording.mutate(owner)
    if name not in STORE and name not in _BY_PLACE:
        recording.ask_identity(owner, *args)
    for arg in args if name in _TAKE_ALL else ():
        recording.advance(arg, f"passed to {name}()") if isinstance(arg, Iterator) else recording.read_content(arg)


def note_in_place(recording: Recording, owner: Any, value: Any) -> None:
    """Record what `owner += value` and the like read and write of a container, or of an object of a library's class."""
    if not isinstance(owner, CONTAINERS):
        if keeps_state(type(owner)):
            recording.read_deep(owner)
        return
    if not isinstance(owner, list):
        recording.mutate(owner)
        return
    recording.read_content(value)
    if isinstance(value, (list, tuple)):
        for item in value:
            recording.journal.append(owner, item, list.append, recording._title(owner))
    else:
        recording.mutate(owner)


def update(recording: Recording, fn: Any, /, *given: Any, **named: Any) -> None:
    """Record and do `owner.update(*given, **named)`. Before the call, values of keywords cannot be told from a dict to copy."""
    owner = fn.__self__
    for each in given:
        recording.advance(each, "passed to update()") if isinstance(each, Iterator) else recording.read_content(each)
    if all(isinstance(each, dict) for each in given):
        for key in [key for each in (*given, named) for key in each]:
            recording.journal.entry(owner, key, f"{recording._title(owner)}[...]")
    else:
        recording.mutate(owner)
    fn(*given, **named)


__all__ = ["CONTAINERS", "STORE", "note_in_place", "note_method", "update"]
