"""What a traced function writes to Python objects: noted before it happens, undone after the trace, repeated by each call."""

from __future__ import annotations

import array
import collections
import ctypes
import itertools
from collections.abc import Callable, Generator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from spmd.program.reads._number_place import ABSENT
from spmd.program.reads._places import CDATA, content_of, is_same, items_of, slot_value

Put = Callable[[Any], None]
Writes = dict[Any, tuple[str, Any, Callable[[], Any]]]  # by place: its title, what it held before, what it holds now


@dataclass
class Effect:
    """One write that each call repeats.

    Attributes:
        holder: what is written to.
        key: which entry of it; ABSENT if it is the whole content.
        title: the place in messages.
        before: what it held before the trace.
        value: what the trace left there; ABSENT if the entry was removed.
        put: makes the place hold a value.
        read: what the place holds now, or ABSENT.
        is_content: the value is a copy of all that the holder holds.
        was_read: the trace read the place before it wrote there.
    """

    holder: Any
    key: Any
    title: str
    before: Any
    value: Any
    put: Put
    read: Callable[[], Any] = lambda: ABSENT
    is_content: bool = False
    was_read: bool = False


@dataclass
class _Written:
    holder: Any
    key: Any
    title: str
    before: Any
    read: Callable[[], Any]
    put: Put
    is_content: bool


class Journal:
    """Writes of one trace, in order."""

    def __init__(self, is_ignored: Callable[[Any, Any], bool] = lambda holder, key: False) -> None:
        """`is_ignored`: entries (holder, key) that something else puts back."""
        self._is_ignored = is_ignored
        self._first: dict[tuple[Any, ...], _Written] = {}
        self._entries: dict[int, list[Any]] = {}  # by id of a dict the keys written
        self._appended: list[Effect] = []
        self._removed: dict[tuple[Any, ...], None] = {}
        self._orders: dict[int, tuple[dict[Any, Any], list[Any]]] = {}
        self.num_writes = 0
        self._parts: list[Writes] = []  # the innermost last

    def is_written(self, holder: Any, key: Any = ABSENT) -> bool:
        """Whether the trace wrote there before: what is read then came from the trace."""
        first = self._first
        return bool(first) and ((id(holder), _token(key)) in first or (id(holder), _WHOLE) in first)

    def has_met(self, holder: Any) -> bool:
        """Whether the trace wrote to any part of it."""
        return any(written.holder is holder for written in self._first.values())

    @contextmanager
    def part(self) -> Generator[Writes]:
        """What a part of the trace writes, whole when the part is over.

        A container that a library was given before is not noted again when the library changes it: it is looked at.
        """
        writes: Writes = {}
        earlier = {token: (written.title, written.read(), written.read) for token, written in self._first.items()}
        self._parts.append(writes)
        try:
            yield writes
        finally:
            self._parts.pop()
            for token, (title, before, read) in earlier.items():
                now = read()
                if now is not before and not is_same_content(now, before):
                    writes.setdefault(token, (title, before, read))

    def before(self, holder: Any) -> Any:
        """The content that a container had before the trace first changed it, or ABSENT."""
        whole = self._first.get((id(holder), _WHOLE))
        found = ABSENT if whole is None else whole.before
        if not isinstance(holder, dict) or id(holder) not in self._entries:
            return found
        content: dict[Any, Any] = dict(items_of(holder)) if whole is None else dict(found)
        for written in itertools.takewhile(lambda written: written is not whole, self._first.values()):  # what came after is not in it
            if written.holder is holder:
                content[written.key] = written.before
        order = self._orders.get(id(holder), (None, content))[1]
        return {key: content[key] for key in (*order, *content) if content.get(key, ABSENT) is not ABSENT}

    def entries_of(self, holder: Any) -> list[Any]:
        """The keys of a dict's entries that the trace wrote, one by one."""
        return self._entries.get(id(holder), [])

    def entry(self, holder: dict[Any, Any], key: Any, title: str, put: Put | None = None) -> None:
        """An entry of a dict is about to be written. `put`: how, if not in the dict itself (a class)."""

        base = dict_class(holder)

        def place(value: Any) -> None:
            if value is ABSENT:
                base.pop(holder, key, None)
            else:
                base.__setitem__(holder, key, value)

        self._note(holder, key, title, lambda: dict.get(holder, key, ABSENT), put or place)

    def removal(self, holder: dict[Any, Any], key: Any) -> None:
        """An entry of a dict, already noted, is about to be removed; if it comes back, it is the last."""
        self._removed[id(holder), _token(key)] = None
        self._orders.setdefault(id(holder), (holder, list(holder)))

    def cell(self, cell: Any, title: str) -> None:
        """A variable of a closure is about to be written."""

        def place(value: Any) -> None:
            if value is ABSENT:
                del cell.cell_contents
            else:
                cell.cell_contents = value

        self._note(cell, ABSENT, title, lambda: content_of(cell), place)

    def setting(self, holder: Any, key: Any, title: str, read: Callable[[], Any], put: Put) -> None:
        """Something that Python or a library keeps elsewhere is about to be set."""
        self._note(holder, key, title, read, put)

    def slot(self, instance: Any, name: str, descriptor: Any, title: str) -> None:
        """A slot of an object is about to be written."""

        def place(value: Any) -> None:
            if value is ABSENT:
                descriptor.__delete__(instance)
            else:
                descriptor.__set__(instance, value)

        self._note(instance, name, title, lambda: slot_value(instance, descriptor), place)

    def content(self, holder: Any, title: str) -> None:
        """All of a container may be changed by what is called next."""
        copied = copier_of(holder)
        if copied is not None:
            read, put = copied
            self._note(holder, ABSENT, title, read, put, is_content=not isinstance(holder, ContextVar))

    def append(self, holder: Any, value: Any, put: Put, title: str) -> None:
        """An item is about to be added to a list: every call adds one, whatever the list holds."""
        self.content(holder, title)
        self._appended.append(Effect(holder, ABSENT, title, ABSENT, value, put))

    def _note(self, holder: Any, key: Any, title: str, read: Callable[[], Any], put: Put, is_content: bool = False) -> None:
        token = (id(holder), _token(key))
        self.num_writes += 1
        for writes in self._parts:
            if token not in writes and not self._is_ignored(holder, key):
                writes[token] = title, read(), read
        if token not in self._first and not self._is_ignored(holder, key):
            self._first[token] = _Written(holder, key, title, read(), read, put, is_content)
            if key is not ABSENT:
                self._entries.setdefault(id(holder), []).append(key)

    def effects(self, is_before: Callable[[Any], bool], is_read: Callable[[Any, Any], bool]) -> list[Effect]:
        """What each call repeats: the writes to objects that existed before the trace.

        Args:
            is_before: whether an object existed before the trace.
            is_read: whether the trace read a place (holder, key; ABSENT for all of it), so that what it held before is guarded.
        """
        appended = {id(e.holder) for e in self._appended}
        effects: list[Effect] = []
        for written in self._first.values():
            if not is_before(written.holder):
                continue
            if written.key is ABSENT and id(written.holder) in appended and not is_read(written.holder, ABSENT):
                effects += [e for e in self._appended if e.holder is written.holder]
                continue
            now = written.read()
            is_same = now is written.before or is_same_content(now, written.before)
            put = written.put
            if (id(written.holder), _token(written.key)) in self._removed and now is not ABSENT:
                is_same, put = False, partial(_put_last, put)
            if not is_same or not is_read(written.holder, written.key):
                was_read = is_read(written.holder, written.key)
                effects.append(
                    Effect(written.holder, written.key, written.title, written.before, now, put, written.read, written.is_content, was_read)
                )
        return effects

    def undo(self, is_before: Callable[[Any], bool]) -> None:
        """Every object that existed before the trace holds again what it held."""
        for written in reversed(self._first.values()):
            if not is_before(written.holder):
                continue
            now = written.read()
            if now is not written.before and not is_same_content(now, written.before):
                written.put(written.before)
        for holder, order in self._orders.values():
            if is_before(holder) and list(holder) != order:
                base = dict_class(holder)
                for key in [key for key in order if key in holder]:
                    base.__setitem__(holder, key, base.pop(holder, key))


def _put_last(put: Put, value: Any) -> None:
    put(ABSENT)
    put(value)


def dict_class(holder: dict[Any, Any]) -> Any:
    """The class whose methods change a dict past what its own class makes of them."""
    return collections.OrderedDict if isinstance(holder, collections.OrderedDict) else dict


def _token(key: Any) -> Any:
    if type(key) is str:
        return key
    try:
        hash(key)
    except TypeError:
        return id(key)
    return key if isinstance(key, (str, int, bytes, tuple, float, bool)) else id(key)


_WHOLE = _token(ABSENT)


def is_same_content(now: Any, before: Any) -> bool:
    if type(now) is list and type(before) is list:
        return len(now) == len(before) and all(a is b for a, b in zip(now, before, strict=True))
    if type(now) is dict and type(before) is dict:
        return list(now) == list(before) and all(a is b for a, b in zip(now.values(), before.values(), strict=True))
    if isinstance(now, np.ndarray):
        return isinstance(before, np.ndarray) and now.shape == before.shape and now.tobytes() == before.tobytes()
    return is_same(now, before)


def is_environment(holder: Any) -> bool:
    """Whether an object shows the environment of the process."""
    return type(holder).__module__ == "os" and type(holder).__name__ == "_Environ"


def _put_environment(holder: Any, content: dict[str, str]) -> None:
    for name in [name for name in holder if name not in content]:
        del holder[name]
    holder.update({name: value for name, value in content.items() if holder.get(name) != value})


def copier_of(holder: Any) -> tuple[Callable[[], Any], Put] | None:
    """What copies the content of a container and what puts a copy back; None for other objects."""
    if isinstance(holder, dict):
        base = dict_class(holder)

        def put_dict(content: Any) -> None:
            base.clear(holder)
            for key, value in content.items():
                base.__setitem__(holder, key, value)

        return lambda: dict(items_of(holder)), put_dict
    if isinstance(holder, list):
        return lambda: list(list.__iter__(holder)), lambda content: list.__setitem__(holder, slice(None), content)
    if isinstance(holder, collections.deque):

        def put_deque(content: Any) -> None:
            collections.deque.clear(holder)
            collections.deque.extend(holder, content)

        return lambda: list(collections.deque.__iter__(holder)), put_deque
    if isinstance(holder, set):

        def put_set(content: Any) -> None:
            set.clear(holder)
            set.update(holder, content)

        return lambda: frozenset(holder), put_set
    if isinstance(holder, bytearray):
        return lambda: bytes(holder), lambda content: holder.__setitem__(slice(None), content)
    if isinstance(holder, array.array):

        def put_array(content: Any) -> None:
            if len(content) == len(holder) * holder.itemsize:
                memoryview(holder).cast("B")[:] = content  # while others look at its memory it cannot be resized
            else:
                array.array.__delitem__(holder, slice(None))
                array.array.frombytes(holder, content)

        return lambda: array.array.tobytes(holder), put_array
    if isinstance(holder, CDATA):

        def put_number(content: Any) -> None:
            ctypes.memmove(ctypes.addressof(holder), content, len(content))

        return lambda: bytes(holder), put_number
    if is_environment(holder):
        return partial(dict, holder), partial(_put_environment, holder)
    if isinstance(holder, ContextVar):
        return lambda: holder.get(ABSENT), lambda content: None if content is ABSENT else holder.set(content) and None
    if isinstance(holder, np.ndarray):
        return holder.copy, lambda content: holder.__setitem__(..., content)
    return None
