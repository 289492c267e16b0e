"""`Place`: what a trace read of one holder (a dict, a list, a cell, a slot, a function, an array), and the comparison with its content now.

The comparison runs no user code: it uses the methods of `dict` and `list` themselves, not overrides in a subclass.
"""

from __future__ import annotations

import array
import collections
import ctypes
import threading
import types
import weakref
from collections.abc import Callable
from contextvars import ContextVar
from functools import partial
from operator import attrgetter
from typing import Any

import numpy as np
import torch

from spmd.device._storage import buffer_of, is_device_tensor, is_whole
from spmd.program.reads._hidden_state import IN_MEMORY, stream_content
from spmd.program.reads._host_bytes import put_host_bytes
from spmd.program.reads._number_place import ABSENT, INPUT, NumberPlace, is_tuple, part_of, paths_of
from spmd.program.reads._varying import Varying

PLAIN = (bool, int, float, complex, str, bytes, type(None), type(...), range, slice, torch.dtype, torch.device, torch.Size, np.generic)
CDATA: Any = (ctypes.Structure, ctypes.Union, ctypes.Array, ctypes.c_int.__mro__[1])  # the last: the base class of all numbers
_METHODS = (types.MethodType, types.BuiltinMethodType, types.MethodWrapperType)
_MOST_SHOWN = 8  # largest container that a message shows with its items

# (holder, key, value now) -> the value that a guard expects of the entry; INPUT, alone or in a tuple, accepts any number
Expected = Callable[[Any, Any, Any], Any]


class Like:
    """Expected value for a tensor that every call replaces: any tensor of the same class, shape, dtype and sharding."""

    def __init__(self, tensor: torch.Tensor) -> None:
        buffer = buffer_of(tensor)
        self._expected = type(tensor), tensor.shape, tensor.dtype, tensor.requires_grad
        self._annotation = buffer.annotation

    @property
    def text(self) -> str:
        """The expected value in a message."""
        _, shape, dtype, _ = self._expected
        return f"a tensor like the first ({str(dtype).removeprefix('torch.')}{list(shape)}, {self._annotation or 'no layout'})"

    def fits(self, value: Any) -> bool:
        """Whether `value` is such a tensor, and covers its whole storage."""
        if not is_device_tensor(value) or (type(value), value.shape, value.dtype, value.requires_grad) != self._expected:
            return False
        buffer = buffer_of(value)
        return buffer.dropped is None and buffer.annotation in (None, self._annotation) and is_whole(value, buffer)


class LikeContainer(Like):
    """Expected value for a tuple, list or dict with such tensors: any container of the same structure. Varying numbers may differ."""

    def __init__(self, container: Any) -> None:
        self._type = type(container)
        self._keys = list(container) if isinstance(container, dict) else None
        self.parts = [like(part) for part in items_in(container)]
        self._identities = _identities(container)

    @property
    def text(self) -> str:
        return f"a {self._type.__name__} of {len(self.parts)} with tensors like the first"

    def fits(self, value: Any) -> bool:
        if type(value) is not self._type or len(value) != len(self.parts) or (self._keys is not None and list(value) != self._keys):
            return False
        return all(map(is_same, items_in(value), self.parts)) and _identities(value) == self._identities


def items_in(value: Any) -> list[Any]:
    """The items of a tuple or list, the values of a dict; nothing for other values."""
    if isinstance(value, tuple) or type(value) is list:
        return list(value)
    return list(value.values()) if type(value) is dict else []


def all_in(value: Any) -> list[Any]:
    """A value and everything inside it, through tuples, lists and dicts; the value alone if one of these contains itself."""
    found: list[Any] = []

    def walk(inner: Any, around: tuple[Any, ...]) -> bool:
        if any(inner is outer for outer in around):
            return False
        found.append(inner)
        return all(walk(part, (*around, inner)) for part in items_in(inner))

    return found if walk(value, ()) else [value]


def like(value: Any) -> Any:
    """The expected value for one that every call replaces: `Like`, `LikeContainer`, INPUT for a varying number, or the value itself."""
    if type(value) is Varying:
        return INPUT
    if is_device_tensor(value):
        return Like(value)
    return LikeContainer(value) if any(is_device_tensor(part) or type(part) is Varying for part in all_in(value)) else value


def _identities(container: Any) -> list[int]:
    """Which tensors in a container are the same object: for each tensor, its number among the distinct ones."""
    first: dict[int, int] = {}
    return [first.setdefault(id(inner), len(first)) for inner in all_in(container) if isinstance(inner, torch.Tensor)]


def is_same(new: Any, old: Any) -> bool:
    """Whether a program may take `new` for the expected value `old`: the same object, or an equal plain value.

    Floats are compared by their bits: -0.0 differs from 0.0, and NaN equals NaN.
    """
    if new is old:
        return True
    if old is INPUT:
        return True
    if isinstance(old, Like):
        return old.fits(new)
    if type(new) is not type(old):
        return False
    if isinstance(old, (float, complex, np.generic)):
        return np.asarray(new).tobytes() == np.asarray(old).tobytes()
    if is_tuple(old) or type(old) is frozenset:
        return len(new) == len(old) and all(map(is_same, new, old))
    if isinstance(old, slice):
        return all(map(is_same, (new.start, new.stop, new.step), (old.start, old.stop, old.step)))
    return isinstance(old, (*PLAIN, *_METHODS)) and bool(new == old)


def items_of(holder: dict[Any, Any]) -> list[tuple[Any, Any]]:
    """The entries of a dict in its order, without the overrides of its class."""
    base: Any = collections.OrderedDict if isinstance(holder, collections.OrderedDict) else dict
    return list(base.items(holder))


def _item_of(base: Any, holder: Any, index: int) -> Any:
    try:
        return base.__getitem__(holder, index)
    except IndexError:
        return ABSENT


def _has_changed(new: Any, old: Any) -> bool:
    return type(old) in (int, float) and type(new) is type(old) and not is_same(new, old)


def _numbers(holder: Any, key: Any, look: Callable[[], Any], old: Any, place: Callable[[Any], None]) -> list[NumberPlace]:
    """The places of numbers in an entry, alone or in tuples, that differ from `old`."""
    new = look()
    before = tuple.__new__(type(new), old.parts) if isinstance(old, LikeContainer) and is_tuple(new) else old
    found = [] if new is old else list(paths_of(new, before, _has_changed))
    return [NumberPlace(holder, key, path, type(part_of(new, path)), look, place) for path in found]


def named(key: Any) -> Any:
    """A key in a message: a plain key as it is, another by its class, because its `repr` may be long."""
    return key if isinstance(key, PLAIN) else type(key)


def shown_key(key: Any) -> str:
    """A key between brackets in a message."""
    return repr(key) if isinstance(key, PLAIN) else f"{type(key).__name__} at {id(key):#x}"


def shown(value: Any) -> str:
    """A value in a message."""
    if isinstance(value, PLAIN) or value is ABSENT:
        return repr(value)
    if isinstance(value, (types.FunctionType, type)):
        return value.__qualname__
    if type(value) in (list, tuple, frozenset) and len(value) <= _MOST_SHOWN and all(isinstance(v, PLAIN) for v in value):
        return repr(value)
    if isinstance(value, Like):
        return value.text
    return f"{'a tensor' if isinstance(value, torch.Tensor) else type(value).__name__} at {id(value):#x}"


class Place:
    """Base class: what a trace read of one holder.

    Attributes:
        holder: the object that holds the values.
        title: the name of the holder in messages; a format string for a name of an entry where there are several.
    """

    __slots__ = ("holder", "title")

    def __init__(self, holder: Any, title: str) -> None:
        self.holder = holder
        self.title = title

    def difference(self) -> str | None:
        """A message that says what differs from the expected content; None if nothing does."""
        raise NotImplementedError

    def values(self) -> list[Any]:
        """The values that were read."""
        return []

    def changed_numbers(self) -> list[NumberPlace]:
        """The ints and floats that were read and have changed."""
        return []

    def settle(self, expected: Expected) -> None:
        """Expect `expected(holder, key, value now)` of every entry that was read."""

    def expect(self, key: Any, value: Any) -> None:
        """Expect `value` for `key`, if that was read."""

    def has_read(self, key: Any) -> bool:
        """Whether the value of `key` was read (ABSENT: the whole content)."""
        return False


class DictPlace(Place):
    """What was read of a dict: the values of some keys, the presence of some keys, or the whole content.

    Attributes:
        entries: values that were read, by key; ABSENT for a missing key.
        present: whether a key was in the dict, by key, where only that was read.
        whole: all keys and all values, if the whole content was read.
        replaced: keys that the trace assigned before it read the whole content, so their old values were not read.
    """

    __slots__ = ("entries", "present", "put", "replaced", "whole")

    def __init__(self, holder: dict[Any, Any], title: str, put: Callable[[Any, Any], None] | None = None) -> None:
        """`put` sets an entry, if the dict itself must not be written to (that of a class)."""
        super().__init__(holder, title)
        self.put = put
        self.entries: dict[Any, Any] = {}
        self.present: dict[Any, bool] = {}
        self.whole: tuple[list[Any], list[Any]] | None = None
        self.replaced: list[Any] = []

    def values(self) -> list[Any]:
        return [*self.entries.values(), *(self.whole[1] if self.whole else ())]

    def settle(self, expected: Expected) -> None:
        holder = self.holder
        entries = {key: expected(holder, key, dict.get(holder, key, ABSENT)) for key in self.entries}
        self.entries = {key: value for key, value in entries.items() if value is not INPUT}
        self.present = {key: dict.__contains__(holder, key) for key in self.present}
        if self.whole is not None:
            now = items_of(holder)
            self.whole = [key for key, _ in now], [INPUT if k in self.replaced else expected(holder, k, value) for k, value in now]

    def changed_numbers(self) -> list[NumberPlace]:
        holder, put = self.holder, self.put or (lambda key, value: dict.__setitem__(self.holder, key, value))
        whole = {} if self.whole is None else dict(zip(*self.whole, strict=True))
        entries = {**whole, **self.entries}.items()
        return [n for key, old in entries for n in _numbers(holder, key, partial(dict.get, holder, key, ABSENT), old, partial(put, key))]

    def has_read(self, key: Any) -> bool:
        if key is ABSENT:
            return self.whole is not None
        return key in self.entries if self.whole is None else key not in self.replaced

    def expect(self, key: Any, value: Any) -> None:
        if key in self.entries:
            self.entries[key] = value
        if key in self.present:
            self.present[key] = True
        if self.whole is not None:
            keys, values = self.whole
            if key in keys:
                values[keys.index(key)] = value
            else:
                keys.append(key)
                values.append(value)

    def difference(self) -> str | None:
        holder = self.holder
        for key, old in self.entries.items():
            new = dict.get(holder, key, ABSENT)
            if new is not old and not is_same(new, old):
                return f"{self.title.format(named(key))} changed from {shown(old)} to {shown(new)}"
        for key, was_there in self.present.items():
            if dict.__contains__(holder, key) is not was_there:
                return f"{self.title.format(named(key))} {'is missing now' if was_there else 'is there now'}"
        if self.whole is not None:
            keys, values = self.whole
            now = items_of(holder)
            if len(keys) != len(now) or not all(is_same(key, old) for (key, _), old in zip(now, keys, strict=True)):
                return f"{self.title.partition('{')[0].rstrip('.[')} got or lost entries"
            for key, (_, new), old in zip(keys, now, values, strict=True):
                if new is not old and not is_same(new, old):
                    return f"{self.title.format(named(key))} changed from {shown(old)} to {shown(new)}"
        return None


class ListPlace(Place):
    """What was read of a list or deque: some items, or the whole content.

    Attributes:
        items: items that were read, by index.
        whole: all items, if the whole content or the length was read.
    """

    __slots__ = ("items", "whole")

    def __init__(self, holder: Any, title: str) -> None:
        super().__init__(holder, title)
        self.items: dict[int, Any] = {}
        self.whole: list[Any] | None = None

    def values(self) -> list[Any]:
        return [*self.items.values(), *(self.whole or ())]

    def settle(self, expected: Expected) -> None:
        base: Any = collections.deque if isinstance(self.holder, collections.deque) else list
        items = {index: expected(self.holder, index, base.__getitem__(self.holder, index)) for index in self.items}
        self.items = {index: value for index, value in items.items() if value is not INPUT}
        if self.whole is not None:
            self.whole = [expected(self.holder, i, value) for i, value in enumerate(base.__iter__(self.holder))]

    def changed_numbers(self) -> list[NumberPlace]:
        base: Any = collections.deque if isinstance(self.holder, collections.deque) else list
        holder, items = self.holder, {**dict(enumerate(self.whole or ())), **self.items}
        return [
            number
            for i, old in items.items()
            for number in _numbers(holder, i, partial(_item_of, base, holder, i), old, partial(base.__setitem__, holder, i))
        ]

    def has_read(self, key: Any) -> bool:
        return self.whole is not None

    def difference(self) -> str | None:
        base: Any = collections.deque if isinstance(self.holder, collections.deque) else list
        for index, old in self.items.items():
            try:
                new = base.__getitem__(self.holder, index)
            except IndexError:
                new = ABSENT
            if new is not old and not is_same(new, old):
                return f"{self.title.format(index)} changed from {shown(old)} to {shown(new)}"
        if self.whole is None:
            return None
        if base.__len__(self.holder) != len(self.whole):
            return f"{self.title.partition('[{')[0]} has {base.__len__(self.holder)} items, it had {len(self.whole)}"
        for index, (new, old) in enumerate(zip(base.__iter__(self.holder), self.whole, strict=True)):
            if new is not old and not is_same(new, old):
                return f"{self.title.format(index)} changed from {shown(old)} to {shown(new)}"
        return None


class ContentPlace(Place):
    """The whole content of an object that is neither a dict nor a list: a set, the bytes of an array, a context variable.

    Attributes:
        read: gives the content now, in a form that `is_same` compares.
        content: the expected content: what the trace saw.
        put: sets the content, where that is one value.
    """

    __slots__ = ("content", "put", "read")

    def __init__(self, holder: Any, title: str, read: Callable[[], Any], put: Callable[[Any], None] | None = None) -> None:
        super().__init__(holder, title)
        self.put = put
        self.read = read
        self.content = read()

    def values(self) -> list[Any]:
        return [self.content] if not isinstance(self.content, (tuple, frozenset)) else list(self.content)

    def settle(self, expected: Expected) -> None:
        self.content = expected(self.holder, self.title, self.read())

    def changed_numbers(self) -> list[NumberPlace]:
        return [] if self.put is None else _numbers(self.holder, self.title, self.read, self.content, self.put)

    def has_read(self, key: Any) -> bool:
        return True

    def expect(self, key: Any, value: Any) -> None:
        self.content = value

    def put_back(self) -> None:
        """Restore what the trace saw in an array or CPU tensor."""
        if isinstance(self.holder, torch.Tensor):
            put_host_bytes(self.holder, self.content)
        elif not self.holder.dtype.hasobject:
            shape, dtype, values, _ = self.content
            if (self.holder.shape, self.holder.dtype.str) == (shape, dtype):
                self.holder[...] = np.frombuffer(values, dtype).reshape(shape)

    def difference(self) -> str | None:
        now = self.read()
        if is_same(now, self.content):
            return None
        if all(isinstance(v, PLAIN) and not isinstance(v, bytes) for v in (now, self.content)) or not isinstance(now, (tuple, frozenset)):
            return f"{self.title} changed from {shown(self.content)} to {shown(now)}"
        return f"the content of {self.title} changed"


class _ValuePlace(ContentPlace):
    """A place whose content is one value."""

    __slots__ = ()

    def values(self) -> list[Any]:
        return [self.content]


class CellPlace(_ValuePlace):
    """The cell of a closure variable."""

    __slots__ = ()

    def __init__(self, cell: types.CellType, name: str) -> None:
        super().__init__(cell, name, lambda: content_of(cell), partial(setattr, cell, "cell_contents"))


class SlotPlace(_ValuePlace):
    """An attribute in a slot (`__slots__`) of an object."""

    __slots__ = ("descriptor",)

    def __init__(self, instance: Any, descriptor: types.MemberDescriptorType, title: str) -> None:
        super().__init__(instance, title, lambda: slot_value(instance, descriptor), partial(descriptor.__set__, instance))
        self.descriptor = descriptor


class FunctionPlace(ContentPlace):
    """The code and the defaults of a function."""

    __slots__ = ()

    def __init__(self, fn: types.FunctionType, title: str) -> None:
        super().__init__(fn, title, lambda: _definition(fn))


class AttributePlace(_ValuePlace):
    """An attribute that is stored in C: a function's name, an array's shape."""

    __slots__ = ("get",)

    def __init__(self, instance: Any, name: str, title: str) -> None:
        self.get = attrgetter(name)
        super().__init__(instance, title, lambda: getattr(instance, name, ABSENT))


def content_place(value: Any, title: str) -> ContentPlace | None:
    """The place for the whole content of `value`, if it is mutable and neither a dict nor a list."""
    if isinstance(value, types.FunctionType):
        return FunctionPlace(value, title)
    read = _reader_of(value)
    return None if read is None else ContentPlace(value, title, read)


def _reader_of(value: Any) -> Callable[[], Any] | None:
    if isinstance(value, (set, frozenset)):
        return lambda: frozenset(value) if all(isinstance(v, PLAIN) for v in value) else tuple(sorted(map(id, value)))
    if isinstance(value, np.ndarray) and value.dtype.hasobject:
        return lambda: tuple(value.ravel().tolist())
    if isinstance(value, np.ndarray):
        return lambda: (value.shape, value.dtype.str, value.tobytes(), value.flags.writeable)
    if isinstance(value, (bytearray, memoryview, array.array)):
        return lambda: bytes(value)
    if isinstance(value, IN_MEMORY):
        return lambda: stream_content(value)
    if isinstance(value, ContextVar):
        return lambda: value.get(ABSENT)
    if isinstance(value, CDATA):
        return lambda: ctypes.string_at(ctypes.addressof(value), ctypes.sizeof(value))
    if isinstance(value, weakref.ReferenceType):
        return lambda: value() is None
    if isinstance(value, threading.local):
        return threading.get_ident  # each thread has its own attributes
    return None


def content_of(cell: Any) -> Any:
    """The content of a cell; ABSENT if it is empty."""
    try:
        return cell.cell_contents
    except ValueError:
        return ABSENT


def slot_value(instance: Any, descriptor: types.MemberDescriptorType) -> Any:
    """The value of a slot; ABSENT if it is unset."""
    try:
        return descriptor.__get__(instance, type(instance))
    except AttributeError:
        return ABSENT


def _definition(fn: types.FunctionType) -> tuple[Any, ...]:
    from spmd.program.reads._swap import code_of

    return (code_of(fn), fn.__defaults__, fn.__kwdefaults__ is None, *(fn.__kwdefaults__ or {}).items())
