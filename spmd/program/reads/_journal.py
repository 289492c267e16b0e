"""`Journal`: the writes of a traced function to Python objects. Noted before they happen, undone after the trace, repeated by each call."""

from __future__ import annotations

import array
import collections
import ctypes
import itertools
import sys
from collections.abc import Callable, Collection, Generator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import numpy as np

from spmd.program.reads._hidden_state import IN_MEMORY, SIGNALS, put_stream, stream_content
from spmd.program.reads._number_place import ABSENT
from spmd.program.reads._output_settings import shown_now
from spmd.program.reads._places import CDATA, PLAIN, content_of, is_same, items_of, slot_value

Put = Callable[[Any], None]
PutIn = Callable[[Any], Put]  # a holder -> the function that sets the value of a place in it
Writes = dict[Any, tuple[str, Any, Callable[[], Any]]]  # by place: its title, its old value, and a function that reads its value


@dataclass
class Effect:
    """One write that each call repeats.

    Attributes:
        holder: the object that is written to.
        key: the entry that is written; ABSENT if it is the whole content.
        title: the place in messages.
        before: the value before the trace.
        value: the value that the trace left; ABSENT if the entry was removed.
        put: sets the value of the place.
        read: gives the value of the place now, or ABSENT.
        is_content: whether the value is a copy of the whole content of the holder.
        was_read: whether the trace read the place before it wrote it.
        put_in: gives `put` for another holder of the same kind; None if there is none.
        held: (position in `TraceState.held`, a function that gives the holder in an object) if calls find another object here; else None.
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
    put_in: PutIn | None = None
    held: tuple[int, Callable[[Any], Any]] | None = None

    def of_program(self) -> Effect:
        """The write as a program keeps it: without values that are not plain, which would keep what is in them alive, up to the trace."""
        before, value = (kept if isinstance(kept, PLAIN) else ABSENT for kept in (self.before, self.value))
        return replace(self, before=before, value=value)


@dataclass
class _Written:
    """The first write to a place; the fields are as in `Effect`."""

    holder: Any
    key: Any
    title: str
    before: Any
    read: Callable[[], Any]
    put: Put
    is_content: bool
    put_in: PutIn | None
    holds: bool  # whether `read` gives the object in the place itself, rather than a copy of its content

    def is_left(self, now: Any) -> bool:
        """Whether `now`, which the place has at the end, is what it had before. A list that is in the place itself must be the same one."""
        return now is self.before or (is_same if self.holds else is_same_content)(now, self.before)


class Journal:
    """The writes of one trace, in order.

    Attributes:
        num_writes: number of writes noted so far, repeated ones included.
        outputs: what the trace has printed and written to files. See `_pending_outputs`.
        repeats_outputs: every call does all of it.
        puts_off: all of it waits for the end of a call, since it runs code of the user's; None if the trace has to start again for that.
        positions: files whose position the function has asked for or set, each with the line.
        num_written: number of outputs that an earlier trace for this call has written.
        standard: the standard output and the standard error when the trace began.
    """

    def __init__(self, is_ignored: Callable[[Any, Any], bool] = lambda holder, key: False) -> None:
        """`is_ignored(holder, key)` says whether something else restores an entry."""
        self._is_ignored = is_ignored
        self._first: dict[tuple[Any, ...], _Written] = {}  # the first write to each place
        self._entries: dict[int, list[Any]] = {}  # keys that were written, by id of the dict
        self._appended: list[Effect] = []
        self._removed: dict[tuple[Any, ...], None] = {}  # places of removed entries
        self._orders: dict[int, tuple[dict[Any, Any], list[Any]]] = {}  # original order of the keys of dicts with removed entries
        self.num_writes = 0
        self.outputs: list[Any] = []
        self.repeats_outputs, self.num_written = False, 0
        self.puts_off: bool | None = False
        self.positions: list[tuple[Any, str]] = []
        self.standard = sys.stdout, sys.stderr
        self.shown = shown_now()
        self._parts: list[Writes] = []  # the innermost last

    def is_written(self, holder: Any, key: Any = ABSENT) -> bool:
        """Whether the trace has written this place, so that a read of it gives a value of the trace."""
        first = self._first
        return bool(first) and ((id(holder), _token(key)) in first or (id(holder), _WHOLE) in first)

    def holders(self) -> list[Any]:
        """The objects that the trace has written to."""
        return [written.holder for written in self._first.values()]

    @property
    def is_in_part(self) -> bool:
        """Whether a part of the trace runs: a branch, a loop body, a micro-batch."""
        return bool(self._parts)

    def has_met(self, holder: Any) -> bool:
        """Whether the trace has written any part of `holder`."""
        return any(written.holder is holder for written in self._first.values())

    def keep(self, is_kept: Callable[[Any], bool]) -> None:
        """Drop the notes about writes to other holders."""
        self._first = {token: written for token, written in self._first.items() if is_kept(written.holder)}
        self._appended = [effect for effect in self._appended if is_kept(effect.holder)]
        self._orders = {number: order for number, order in self._orders.items() if is_kept(order[0])}
        kept = {number for number, _ in self._first}
        self._entries = {number: keys for number, keys in self._entries.items() if number in kept}
        self._removed = {token: None for token in self._removed if token[0] in kept}

    @contextmanager
    def part(self) -> Generator[Writes]:
        """Collect the writes of one part of the trace (a branch, a loop body). Complete when the block ends.

        A library may change a container that it received earlier without a new note. So all noted places are compared at the end.
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
        """The content of a container before the trace first changed it; ABSENT if it did not."""
        whole = self._first.get((id(holder), _WHOLE))
        found = ABSENT if whole is None else whole.before
        if not isinstance(holder, dict) or id(holder) not in self._entries:
            return found
        content: dict[Any, Any] = dict(items_of(holder)) if whole is None else dict(found)
        for written in itertools.takewhile(lambda written: written is not whole, self._first.values()):  # later writes are not in it
            if written.holder is holder:
                content[written.key] = written.before
        order = self._orders.get(id(holder), (None, content))[1]
        return {key: content[key] for key in (*order, *content) if content.get(key, ABSENT) is not ABSENT}

    def entries_of(self, holder: Any) -> list[Any]:
        """The keys of a dict that the trace wrote one by one."""
        return self._entries.get(id(holder), [])

    def entry(self, holder: dict[Any, Any], key: Any, title: str, put: Put | None = None) -> None:
        """Before an entry of a dict is written. `put` sets it, if the dict itself must not be written to (that of a class)."""
        put_in = partial(_entry_of, key) if put is None else None
        self._note(holder, key, title, lambda: dict.get(holder, key, ABSENT), put or _entry_of(key, holder), put_in=put_in, holds=True)

    def removal(self, holder: dict[Any, Any], key: Any) -> None:
        """Before an entry of a dict that is noted already is removed. If it is added again, it moves to the end of the dict."""
        self._removed[id(holder), _token(key)] = None
        self._orders.setdefault(id(holder), (holder, list(holder)))

    def cell(self, cell: Any, title: str) -> None:
        """Before a closure variable is written."""

        def place(value: Any) -> None:
            if value is ABSENT:
                del cell.cell_contents
            else:
                cell.cell_contents = value

        self._note(cell, ABSENT, title, lambda: content_of(cell), place, holds=True)

    def setting(self, holder: Any, key: Any, title: str, read: Callable[[], Any], put: Put) -> None:
        """Before a setting that Python or a library stores elsewhere is set."""
        self._note(holder, key, title, read, put)

    def slot(self, instance: Any, name: str, descriptor: Any, title: str) -> None:
        """Before a slot of an object is written."""
        put_in = partial(_slot_of, descriptor)
        self._note(instance, name, title, lambda: slot_value(instance, descriptor), put_in(instance), put_in=put_in, holds=True)

    def content(self, holder: Any, title: str) -> None:
        """Before a call that may change the whole content of a container."""
        copied = copier_of(holder)
        if copied is not None:
            read, put = copied
            put_in = _content_of if isinstance(holder, (dict, list, collections.deque)) else None
            self._note(holder, ABSENT, title, read, put, not isinstance(holder, ContextVar), put_in)

    def append(self, holder: Any, value: Any, add: Callable[[Any, Any], None], title: str) -> None:
        """Before an item is added to a list, deque or set by `add(holder, item)`. Every call adds one, whatever the container holds."""
        self.content(holder, title)
        put_in = partial(partial, add)
        self._appended.append(Effect(holder, ABSENT, title, ABSENT, value, put_in(holder), put_in=put_in))

    def _note(
        self,
        holder: Any,
        key: Any,
        title: str,
        read: Callable[[], Any],
        put: Put,
        is_content: bool = False,
        put_in: PutIn | None = None,
        holds: bool = False,
    ) -> None:
        token = (id(holder), _token(key))
        self.num_writes += 1
        for writes in self._parts:
            if token not in writes and not self._is_ignored(holder, key):
                writes[token] = title, read(), read
        if token not in self._first and not self._is_ignored(holder, key):
            self._first[token] = _Written(holder, key, title, read(), read, put, is_content, put_in, holds)
            if key is not ABSENT:
                self._entries.setdefault(id(holder), []).append(key)

    def effects(self, is_before: Callable[[Any], bool], is_read: Callable[[Any, Any], bool]) -> list[Effect]:
        """The writes to objects that existed before the trace, for each call to repeat.

        Args:
            is_before: whether an object existed before the trace.
            is_read: whether the trace read a place (holder, key; ABSENT for the whole content), so that its old value is guarded.
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
            is_left = written.is_left(now)
            put, put_in = written.put, written.put_in
            if (id(written.holder), _token(written.key)) in self._removed and now is not ABSENT:
                is_left, put, put_in = False, partial(_put_last, put), None
            if not is_left or not is_read(written.holder, written.key):
                was_read = is_read(written.holder, written.key)
                place = written.holder, written.key, written.title
                effects.append(Effect(*place, written.before, now, put, written.read, written.is_content, was_read, put_in))
        for holder, _ in self._orders.values():
            self._order_as_left(holder, effects)
        return effects

    def _order_as_left(self, holder: dict[Any, Any], effects: list[Effect]) -> None:
        """Sort the writes to a dict from which entries were removed: they put entries last, in the order in which the trace left them."""
        order = {_token(key): position for position, key in enumerate(dict_class(holder).keys(holder))}
        places = [i for i, effect in enumerate(effects) if effect.holder is holder and _token(effect.key) in order]
        for i, effect in zip(places, sorted((effects[i] for i in places), key=lambda e: order[_token(e.key)]), strict=True):
            effects[i] = effect

    def undo(self, is_before: Callable[[Any], bool]) -> None:
        """Restore every object that existed before the trace."""
        for written in reversed(self._first.values()):
            if not is_before(written.holder):
                continue
            now = written.read()
            if not written.is_left(now):
                written.put(written.before)
        for holder, order in self._orders.values():
            if is_before(holder) and not _are_same(holder, order):
                base = dict_class(holder)
                for key in [key for key in order if key in holder]:
                    base.__setitem__(holder, key, base.pop(holder, key))


def _entry_of(key: Any, holder: dict[Any, Any]) -> Put:
    base = dict_class(holder)

    def place(value: Any) -> None:
        if value is ABSENT:
            base.pop(holder, key, None)
        else:
            base.__setitem__(holder, key, value)

    return place


def _slot_of(descriptor: Any, instance: Any) -> Put:
    def place(value: Any) -> None:
        if value is ABSENT:
            descriptor.__delete__(instance)
        else:
            descriptor.__set__(instance, value)

    return place


def _content_of(holder: Any) -> Put:
    copied = copier_of(holder)
    assert copied is not None
    return copied[1]


def _put_last(put: Put, value: Any) -> None:
    put(ABSENT)
    put(value)


def dict_class(holder: dict[Any, Any]) -> Any:
    """The class whose methods change a dict without the overrides of its own class."""
    return collections.OrderedDict if isinstance(holder, collections.OrderedDict) else dict


def _token(key: Any) -> Any:
    """A hashable that stands for `key`: a plain key itself, otherwise its id, because its `__eq__` may be user code."""
    if type(key) is str:
        return key
    try:
        hash(key)
    except TypeError:
        return id(key)
    return key if isinstance(key, (str, int, bytes, tuple, float, bool)) else id(key)


_WHOLE = _token(ABSENT)


def is_same_content(now: Any, before: Any) -> bool:
    """Whether two contents are equal: items are compared by identity, arrays by their bytes."""
    if type(now) is list and type(before) is list:
        return len(now) == len(before) and all(a is b for a, b in zip(now, before, strict=True))
    if type(now) is dict and type(before) is dict:
        return _are_same(now, before) and all(a is b for a, b in zip(now.values(), before.values(), strict=True))
    if isinstance(now, np.ndarray):
        return isinstance(before, np.ndarray) and now.shape == before.shape and now.tobytes() == before.tobytes()
    return is_same(now, before)


def _are_same(keys: Collection[Any], others: Collection[Any]) -> bool:
    """Whether these are the same keys in the same order. `==` of two tensors is a tensor."""
    return len(keys) == len(others) and all(map(is_same, keys, others))


def is_environment(holder: Any) -> bool:
    """Whether an object is `os.environ`, or another of its class."""
    return type(holder).__module__ == "os" and type(holder).__name__ == "_Environ"


def _put_environment(holder: Any, content: dict[str, str]) -> None:
    for name in [name for name in holder if name not in content]:
        del holder[name]
    holder.update({name: value for name, value in content.items() if holder.get(name) != value})


def _put_fields(holder: Any, content: tuple[Any, ...]) -> None:
    for name, value in zip(holder.dtype.names, content, strict=True):
        holder[name] = value


def _put_signals(holder: Any, content: dict[Any, bool]) -> None:
    for signal, is_on in content.items():
        holder[signal] = is_on


def copier_of(holder: Any) -> tuple[Callable[[], Any], Put] | None:
    """Functions that copy the content of a container and restore a copy; None for other objects."""
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
                memoryview(holder).cast("B")[:] = content  # in place: an array with exported memory cannot be resized
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
    if isinstance(holder, np.void) and holder.dtype.names:
        return holder.item, partial(_put_fields, holder)
    if type(held := cast(Any, holder)) is SIGNALS:
        return lambda: dict(held.items()), partial(_put_signals, held)
    if isinstance(holder, np.ndarray):
        return holder.copy, lambda content: holder.__setitem__(..., content)
    if isinstance(holder, IN_MEMORY):
        return partial(stream_content, holder), partial(put_stream, holder)
    return None
