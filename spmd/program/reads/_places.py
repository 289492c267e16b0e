"""`Place`: what a trace read of one holder (a dict, a list, a cell, a slot, a function, an array), and the comparison with its content now.

The comparison runs no user code: it uses the methods of `dict` and `list` themselves, not overrides in a subclass.
"""

from __future__ import annotations

import collections
import copy
import ctypes
import types
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import numpy as np
import torch

from spmd.device._storage import buffer_of, is_device_tensor, is_whole
from spmd.program.find._static import attributes_of
from spmd.program.reads._change_texts import change_text
from spmd.program.reads._host_bytes import put_host_bytes
from spmd.program.reads._number_place import ABSENT, INPUT, LENGTH, Entry, ObjectPlace, exact_item, is_tuple

PLAIN = (bool, int, float, complex, str, bytes, type(None), type(...), range, slice, torch.dtype, torch.device, torch.Size, np.generic)
CDATA: tuple[Any, ...] = (ctypes.Structure, ctypes.Union, ctypes.Array, ctypes.c_int.__mro__[1])  # the last: the base class of all numbers
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

    def difference(self, value: Any) -> str | None:
        """A message that says more about why `value` is not such a value, if there is one."""
        return None

    def fits(self, value: Any) -> bool:
        """Whether `value` is such a tensor, and covers its whole storage."""
        if not is_device_tensor(value) or (type(value), value.shape, value.dtype, value.requires_grad) != self._expected:
            return False
        buffer = buffer_of(value)
        return buffer.dropped is None and buffer.annotation in (None, self._annotation) and is_whole(value, buffer)


def is_same(new: Any, old: Any) -> bool:
    """Whether a program may take `new` for the expected value `old`: the same object, or an equal plain value.

    Floats are compared by their bits: -0.0 differs from 0.0, and NaN equals NaN.
    """
    if new is old or old is INPUT:
        return True
    if isinstance(old, Like):
        return old.fits(new)
    if type(new) is not type(old):
        return False
    if isinstance(old, (float, complex, np.generic)):
        return np.asarray(new).tobytes() == np.asarray(old).tobytes()
    if is_tuple(old):
        return len(new) == len(old) and all(map(is_same, new, old))
    if type(old) is frozenset:  # equal ones may have another order
        return new == old and set(map(exact_item, new)) == set(map(exact_item, old))
    if isinstance(old, (slice, range)):  # equal ranges may have other ends
        return all(map(is_same, (new.start, new.stop, new.step), (old.start, old.stop, old.step)))
    return isinstance(old, (*PLAIN, *_METHODS)) and bool(new == old)


def items_of(holder: dict[Any, Any]) -> list[tuple[Any, Any]]:
    """The entries of a dict in its order, without the overrides of its class."""
    base: Any = collections.OrderedDict if isinstance(holder, collections.OrderedDict) else dict
    return list(base.items(holder))


def _sequence_class(holder: Any) -> Any:
    return collections.deque if isinstance(holder, collections.deque) else list


def _item_of(base: Any, holder: Any, index: int) -> Any:
    try:
        return base.__getitem__(holder, index)
    except IndexError:
        return ABSENT


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


def changed(title: str, old: Any, new: Any) -> str:
    """The message for a value that is not the expected one."""
    return (isinstance(old, Like) and old.difference(new)) or change_text(title, old, new, (shown(old), shown(new)))


class Place:
    """Base class: what a trace read of one holder.

    Attributes:
        holder: the object that holds the values.
        title: the name of the holder in messages; a format string for a name of an entry where there are several.
    """

    __slots__ = ("holder", "title")
    reads: ClassVar[tuple[str, ...]] = ()  # the attributes that have what was read

    def __init__(self, holder: Any, title: str) -> None:
        self.holder = holder
        self.title = title

    def difference(self) -> str | None:
        """A message that says what differs from the expected content; None if nothing does."""
        raise NotImplementedError

    def values(self) -> list[Any]:
        """The values that were read."""
        return []

    def entries_read(self) -> list[tuple[Any, Any]]:
        """The entries that were read and can be set: (key, expected value) of each."""
        return []

    def get(self, holder: Any, key: Any) -> Any:
        """The value of an entry of `holder` now, or ABSENT."""
        return ABSENT

    def put(self, holder: Any, key: Any, value: Any) -> None:
        """Set an entry of `holder`."""
        raise NotImplementedError

    def name_of(self, key: Any) -> str:
        """The name of an entry in messages."""
        return self.title.format(named(key))

    def entry(self, key: Any) -> Entry:
        """The entry `key` of this holder."""
        holder, kind = self.holder, self.blank()
        return Entry((id(holder), key), key, lambda: holder, partial(kind.get, holder, key), partial(kind.put, holder, key))

    def holder_in(self, owner: Any) -> Any:
        """What holds these entries in `owner`, an object of the same class as the owner of this holder. ABSENT if it has none."""
        return ABSENT

    def within(self, holder: Any) -> Place:
        """The same reads, of another holder of the same kind."""
        found = copy.copy(self)
        found.holder = holder
        return found

    def blank(self) -> Place:
        """A place of this kind to get and set entries with, which keeps neither this holder alive nor what was read of it."""
        found = self.within(None)
        for name in self.reads:
            delattr(found, name)
        return found

    def entry_within(self, owner: ObjectPlace, key: Any) -> Entry:
        """The entry `key` of the object that is now in the place `owner`."""
        kind = self.blank()

        def holder() -> Any:
            return kind.holder_in(owner.read())

        def look() -> Any:
            now = holder()
            return ABSENT if now is ABSENT else kind.get(now, key)

        return Entry((owner.token, type(kind), key), key, holder, look, lambda value: kind.put(holder(), key, value), owner)

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
        whole: all keys and values, if the whole content was read. A dict, so keys are compared as the holder compares them: `==` of
            two tensors is a tensor.
        replaced: keys that the trace assigned before it read the whole content, so their old values were not read.
        owner: the object whose `__dict__` it is; None for another dict.
    """

    __slots__ = ("_is_of_attributes", "_put", "entries", "owner", "present", "replaced", "whole")
    reads = ("entries", "present", "replaced", "whole")

    def __init__(self, holder: dict[Any, Any], title: str, put: Callable[[Any, Any], None] | None = None, owner: Any = None) -> None:
        """`put` sets an entry, if the dict itself must not be written to (that of a class)."""
        super().__init__(holder, title)
        self._put = put
        self.owner = owner
        self._is_of_attributes = owner is not None
        self.entries: dict[Any, Any] = {}
        self.present: dict[Any, bool] = {}
        self.whole: dict[Any, Any] | None = None
        self.replaced: set[Any] = set()

    def values(self) -> list[Any]:
        return [*self.entries.values(), *(self.whole or {}).values()]

    def settle(self, expected: Expected) -> None:
        holder = self.holder
        entries = {key: expected(holder, key, dict.get(holder, key, ABSENT)) for key in self.entries}
        self.entries = {key: value for key, value in entries.items() if value is not INPUT}
        self.present = {key: dict.__contains__(holder, key) for key in self.present}
        if self.whole is not None:
            self.whole = {k: INPUT if k in self.replaced else expected(holder, k, value) for k, value in items_of(holder)}

    def entries_read(self) -> list[tuple[Any, Any]]:
        return [(key, old) for key, old in {**(self.whole or {}), **self.entries}.items() if key not in self.replaced]

    def get(self, holder: Any, key: Any) -> Any:
        return dict.get(holder, key, ABSENT)

    def put(self, holder: Any, key: Any, value: Any) -> None:
        if self._put is None:
            dict.__setitem__(holder, key, value)
        else:
            self._put(key, value)

    def holder_in(self, owner: Any) -> Any:
        found = attributes_of(owner) if self._is_of_attributes else owner
        return found if isinstance(found, dict) else ABSENT

    def within(self, holder: Any) -> Place:
        found: Any = super().within(holder)
        found.owner = None
        return found

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
            self.whole[key] = value

    def difference(self) -> str | None:
        holder = self.holder
        for key, old in self.entries.items():
            new = dict.get(holder, key, ABSENT)
            if new is not old and not is_same(new, old):
                return changed(self.name_of(key), old, new)
        for key, was_there in self.present.items():
            if dict.__contains__(holder, key) is not was_there:
                return f"{self.title.format(named(key))} {'is missing now' if was_there else 'is there now'}"
        if self.whole is not None:
            now = items_of(holder)
            if len(self.whole) != len(now) or not all(is_same(key, old) for (key, _), old in zip(now, self.whole, strict=True)):
                return f"{self.title.partition('{')[0].rstrip('.[')} got or lost entries"
            for (key, new), old in zip(now, self.whole.values(), strict=True):
                if new is not old and not is_same(new, old):
                    return changed(self.name_of(key), old, new)
        return None


class ListPlace(Place):
    """What was read of a list or deque: some items, or the whole content.

    Attributes:
        items: items that were read, by index.
        length: the length, if that was read; None otherwise, and where it is an input.
        whole: all items, if the whole content was read.
    """

    __slots__ = ("items", "length", "whole")
    reads = ("items", "length", "whole")

    def __init__(self, holder: Any, title: str) -> None:
        super().__init__(holder, title)
        self.items: dict[int, Any] = {}
        self.length: int | None = None
        self.whole: list[Any] | None = None

    def values(self) -> list[Any]:
        return [*self.items.values(), *(self.whole or ())]

    def settle(self, expected: Expected) -> None:
        base = _sequence_class(self.holder)
        items = {index: expected(self.holder, index, base.__getitem__(self.holder, index)) for index in self.items}
        self.items = {index: value for index, value in items.items() if value is not INPUT}
        length = None if self.length is None else expected(self.holder, LENGTH, base.__len__(self.holder))
        self.length = None if length is INPUT else length
        if self.whole is not None:
            self.whole = [expected(self.holder, i, value) for i, value in enumerate(base.__iter__(self.holder))]

    def entries_read(self) -> list[tuple[Any, Any]]:
        length = {} if self.length is None else {LENGTH: self.length}
        return list({**length, **dict(enumerate(self.whole or ())), **self.items}.items())

    def get(self, holder: Any, key: Any) -> Any:
        if key is LENGTH:
            return _sequence_class(holder).__len__(holder)
        return _item_of(_sequence_class(holder), holder, key)

    def put(self, holder: Any, key: Any, value: Any) -> None:
        if key is not LENGTH:  # `len()` gives the number in a trace
            _sequence_class(holder).__setitem__(holder, key, value)

    def expect(self, key: Any, value: Any) -> None:
        if key in self.items:
            self.items[key] = value
        if self.whole is not None:
            self.whole[key] = value

    def holder_in(self, owner: Any) -> Any:
        return owner if isinstance(owner, (list, collections.deque)) else ABSENT

    def has_read(self, key: Any) -> bool:
        return self.whole is not None

    def difference(self) -> str | None:
        base = _sequence_class(self.holder)
        for index, old in self.items.items():
            try:
                new = base.__getitem__(self.holder, index)
            except IndexError:
                new = ABSENT
            if new is not old and not is_same(new, old):
                return changed(self.name_of(index), old, new)
        length = self.length if self.whole is None else len(self.whole)
        if length is not None and base.__len__(self.holder) != length:
            return f"{self.title.partition('[{')[0]} has {base.__len__(self.holder)} items, it had {length}"
        if self.whole is None:
            return None
        for index, (new, old) in enumerate(zip(base.__iter__(self.holder), self.whole, strict=True)):
            if new is not old and not is_same(new, old):
                return changed(self.name_of(index), old, new)
        return None


class ContentPlace(Place):
    """The whole content of an object that is neither a dict nor a list: a set, the bytes of an array, a context variable.

    Attributes:
        read: gives the content now, in a form that `is_same` compares.
        content: the expected content: what the trace saw.
    """

    __slots__ = ("_put", "content", "read")
    reads = ("content",)

    def __init__(self, holder: Any, title: str, read: Callable[[], Any], put: Callable[[Any], None] | None = None) -> None:
        """`put` sets the content, where that is one value."""
        super().__init__(holder, title)
        self._put = put
        self.read = read
        self.content = read()

    def values(self) -> list[Any]:
        return [self.content] if not isinstance(self.content, (tuple, frozenset)) else list(self.content)

    @property
    def key(self) -> Any:
        """The key of its one entry."""
        return self.title

    def name_of(self, key: Any) -> str:
        return self.title

    def settle(self, expected: Expected) -> None:
        self.content = expected(self.holder, self.key, self.read())

    def entries_read(self) -> list[tuple[Any, Any]]:
        return [] if self._put is None else [(self.key, self.content)]

    def get(self, holder: Any, key: Any) -> Any:
        return self.read()

    def put(self, holder: Any, key: Any, value: Any) -> None:
        assert self._put is not None
        self._put(value)

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
                self.holder[...] = np.frombuffer(values, self.holder.dtype).reshape(shape)

    def difference(self) -> str | None:
        now = self.read()
        if is_same(now, self.content):
            return None
        if all(isinstance(v, PLAIN) and not isinstance(v, bytes) for v in (now, self.content)) or not isinstance(now, (tuple, frozenset)):
            return changed(self.title, self.content, now)
        return f"the content of {self.title} changed"


class ValuePlace(ContentPlace):
    """A place whose content is one value."""

    __slots__ = ()

    def values(self) -> list[Any]:
        return [self.content]


class SlotPlace(ValuePlace):
    """An attribute in a slot (`__slots__`) of an object."""

    __slots__ = ("descriptor",)

    def __init__(self, instance: Any, descriptor: types.MemberDescriptorType, title: str) -> None:
        super().__init__(instance, title, lambda: slot_value(instance, descriptor), partial(descriptor.__set__, instance))
        self.descriptor = descriptor

    @property
    def key(self) -> Any:
        return self.descriptor.__name__

    def get(self, holder: Any, key: Any) -> Any:
        return slot_value(holder, self.descriptor)

    def put(self, holder: Any, key: Any, value: Any) -> None:
        self.descriptor.__set__(holder, value)

    def holder_in(self, owner: Any) -> Any:
        return owner if isinstance(owner, self.descriptor.__objclass__) else ABSENT

    def within(self, holder: Any) -> Place:
        found = SlotPlace(holder, self.descriptor, self.title)
        found.content = self.content
        return found


def content_of(cell: Any) -> Any:
    """The content of a cell; ABSENT if it is empty."""
    try:
        return cell.cell_contents
    except ValueError:
        return ABSENT


def slot_value(instance: Any, descriptor: types.MemberDescriptorType) -> Any:
    """The value of a slot; ABSENT if it is unset."""
    try:
        return ABSENT if instance is None else descriptor.__get__(instance, type(instance))
    except AttributeError:
        return ABSENT
