"""`PlacesWritten`: notes each write of instrumented code in the journal before it happens: variables, attributes, items, contents."""

from __future__ import annotations

import collections
import decimal
import functools
import sys
import types
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch

from spmd.program.find._static import attributes_of
from spmd.program.reads._assigned_numbers import elements_of
from spmd.program.reads._builtin_attributes import note_attribute_written_in_c
from spmd.program.reads._copied_elements import CopiedElements
from spmd.program.reads._hooks import QUIET
from spmd.program.reads._late_writes import LateItems, LateWrites, is_of_host
from spmd.program.reads._library import is_library_property, is_recorded
from spmd.program.reads._number_place import ABSENT
from spmd.program.reads._outside import setting_of
from spmd.program.reads._parts import is_sized
from spmd.program.reads._places import CDATA, PLAIN, shown_key
from spmd.program.reads._places_read import PlacesRead, is_simple, resolved
from spmd.program.reads._plain_numbers import Bytes, plain_number
from spmd.program.reads._process_settings import SETTINGS, Setting
from spmd.program.reads._varying import NumbersNeeded, Varying, fixed, fixed_if_varying, with_fixed_keys
from spmd.program.reads._varying_index import by_lists, may_vary, read_at, written_at

if TYPE_CHECKING:
    from spmd.program.reads._recorder import Recording

_THEIRS = sys.stdlib_module_names - {"builtins"} | {"numpy"}
_OF_ANY_CLASS = ("__dict__", "__weakref__", "__class__")
WITH_PARTS = (types.FunctionType, functools.partial)  # `__defaults__`, `__code__`
KEPT_IN_C = (types.FunctionType, collections.defaultdict, np.ndarray, decimal.Context)  # names, defaults, shapes, digits
MEMOS = frozenset({"__dynamo_disable"})  # attributes that torch caches on a function when it is first called


def is_kept_in_c(instance: Any, found: Any) -> bool:
    """Whether an attribute of an object, found in its class, is stored in C (or in a slot) by a class of Python's library or of numpy."""
    if not isinstance(found, (types.MemberDescriptorType, types.GetSetDescriptorType)) or found.__name__ in _OF_ANY_CLASS:
        return False
    owner = found.__objclass__
    is_theirs = issubclass(owner, BaseException) or owner.__module__.partition(".")[0] in _THEIRS
    return isinstance(instance, KEPT_IN_C) or (is_theirs and not isinstance(instance, PLAIN) and not is_recorded(owner.__module__))


class PlacesWritten(PlacesRead):
    """The places that one trace read and wrote.

    Attributes:
        fixes_indices: whether a read of a tensor at a varying index gives a view, with the index guarded by its value.
        has_constant_texts: whether texts of numbers that vary are made during the trace.
        has_late_texts: whether one is made when the call ends.
        copies: elements that were read at a varying index.
        late: the writes to CPU tensors and arrays that every call does when it ends.
    """

    fixes_indices = has_constant_texts = has_late_texts = False

    def __init__(self, names: dict[int, str], owners: dict[int, Any], ignored: set[Any]) -> None:
        super().__init__(names, owners, ignored)
        self.copies, self.late = CopiedElements(), LateWrites()

    def read_content(self, value: Any) -> None:
        """Record the whole content of a container, but not the content of its items."""
        raise NotImplementedError

    def test(self, value: Any) -> None:
        """Before the truth of a value is tested. That of a list depends on its length."""
        if is_sized(value):
            bool(self.read_length(value))
        else:
            self.read_content(value)

    def read_key(self, key: Any) -> None:
        """Record what a lookup reads of its key: the content of an array or a list, the `__hash__` and `__eq__` of an object."""
        self.ask_identity(key)
        if type(key) not in QUIET:
            self.require_no_key(key)
            self.read_content(key)
        elif type(key) is tuple:
            for part in key:
                self.read_content(part)

    def store_global(self, variables: dict[str, Any], name: str) -> None:
        self.journal.entry(variables, name, name)

    def store_cell(self, cell: Any, name: str) -> None:
        self.journal.cell(cell, name)

    def store_attr(self, instance: Any, name: str) -> None:
        instance = resolved(instance)
        cls = type(instance)
        if name in MEMOS:
            return
        if isinstance(instance, (*CDATA, np.void)):
            self.mutate(instance)
            return
        if cls is types.CellType:
            self.store_cell(instance, self._title(instance))
            return
        self.read_special_methods(cls)
        if isinstance(instance, type):
            self._store_in_class(instance, name)
        elif cls is not types.ModuleType and (question := setting_of(instance, name, self._title(instance))) is not None:
            self.ask(instance, question)
            self.journal.setting(instance, name, question[1], question[2], partial(setattr, instance, name))
        elif isinstance(instance, types.ModuleType):
            self.journal.entry(self.owned(instance, instance.__dict__), name, f"{instance.__name__}.{name}")
        elif note_attribute_written_in_c(cast("Recording", self), instance, name):
            return
        elif isinstance(cls.__setattr__, types.WrapperDescriptorType) or not is_recorded(cls.__module__):
            found = next((c.__dict__[name] for c in cls.__mro__ if name in c.__dict__), None)
            is_in_c = isinstance(found, types.GetSetDescriptorType) and (
                isinstance(instance, WITH_PARTS) or name in ("__class__", "__dict__") or is_kept_in_c(instance, found)
            )
            is_library_defined = is_library_property(found) and not isinstance(instance, torch.Tensor)
            if isinstance(found, types.MemberDescriptorType) or is_in_c or is_library_defined:
                self.journal.slot(instance, name, found, f"{self._title(instance)}.{name}")
            elif not hasattr(type(found), "__set__"):
                self._store_attribute(instance, name)
        # any other `__setattr__` is instrumented Python code

    def delete_attr(self, instance: Any, name: str) -> None:
        """Before `del instance.name`."""
        instance = resolved(instance)
        cls: Any = type(instance)
        if isinstance(cls.__delattr__, types.WrapperDescriptorType) and not isinstance(cls.__setattr__, types.WrapperDescriptorType):
            self.store_as_is(instance, name)
        else:
            self.store_attr(instance, name)

    def set_setting(self, setting: Setting) -> None:
        """Before a setting of the process is set."""
        self.ask(SETTINGS, setting.question)
        self.journal.setting(SETTINGS, setting.title, setting.title, setting.read, setting.put)

    def store_as_is(self, instance: Any, name: str) -> None:
        """Before `object.__setattr__(instance, name, value)`, which does not call a `__setattr__` of the class."""
        found = next((c.__dict__[name] for c in type(instance).__mro__ if name in c.__dict__), None)
        if isinstance(found, types.MemberDescriptorType):
            self.journal.slot(instance, name, found, f"{self._title(instance)}.{name}")
        elif not hasattr(type(found), "__set__"):
            self._store_attribute(instance, name)

    def _store_attribute(self, instance: Any, name: str) -> None:
        attributes = attributes_of(instance)
        if attributes is not None and id(attributes) not in self._ignored:
            self._owners[id(attributes)] = instance
            self.journal.entry(attributes, name, f"{self._title(instance)}.{name}")

    def _store_in_class(self, cls: type, name: str) -> None:
        if isinstance(in_c := type.__dict__.get(name), types.GetSetDescriptorType):
            self.journal.slot(cls, name, in_c, f"{cls.__qualname__}.{name}")
            return

        def put(value: Any) -> None:
            if value is ABSENT:
                type.__delattr__(cls, name)
            else:
                type.__setattr__(cls, name, value)

        self.journal.entry(self._class_dicts(cls)[0], name, f"{cls.__qualname__}.{name}", put)
        self._found_in_class.clear()

    def store_item(self, holder: Any, key: Any) -> tuple[Any, Any]:
        """Before `holder[key] = value`. Returns the key and the container to use instead."""
        holder = resolved(holder)
        self.read_key(key)
        if is_of_host(holder):
            return key, LateItems(cast("Recording", self), holder, partial(self._stored_at, holder))
        return self._stored_at(holder, key)

    def _stored_at(self, holder: Any, key: Any) -> tuple[Any, Any]:
        if may_vary(holder, key):
            if not self.fixes_indices and (parted := by_lists(holder, key)) is not None:
                key_of_copy, rest = parted
                first = holder if key_of_copy is None else self.copies.note(read_at(holder, key_of_copy), holder, key_of_copy)
                if first is holder or self.copies.has(first):
                    return rest, self.copies.assigned(first, None, elements_of(first))
            rows = None if self.fixes_indices else written_at(holder, key)
            if rows is not None:  # the holder is a tensor
                return rows[1], self.copies.assigned(holder, key, rows[0])
            key = fixed(key)
        self._write_item(holder, key)
        if type(holder) is memoryview:
            return key, Bytes(holder)
        return key, self.copies.assigned(holder, key, elements_of(holder))

    def delete_item(self, holder: Any, key: Any) -> tuple[Any, Any]:
        """Before `del holder[key]`. Returns the key and the container to use instead."""
        holder = resolved(holder)
        self.read_key(key)
        key = fixed_if_varying(key)
        self._write_item(holder, key)
        if isinstance(holder, dict) and self.journal.is_written(holder, key):
            self.journal.removal(holder, key)
        return key, holder

    def made_with_keys(self, container: Any) -> None:
        """After a dict or set was built: make varying numbers among its keys plain numbers."""
        self.ask_identity(*container)
        with_fixed_keys(container)

    def as_key(self, key: Any) -> Any:
        """Before a comprehension adds a key to a dict or set. Returns the key to use instead."""
        self.ask_identity(key)
        return fixed_if_varying(key)

    def as_hash(self, number: Any) -> Any:
        """Before a `__hash__` returns a number. Returns the number.

        Raises:
            NumbersNeeded: it follows from a number that varies. A container would keep the object under the hash of one call.
            TraceError: only the device knows it.
        """
        if type(number) is Varying:
            raise NumbersNeeded
        return plain_number(number)

    def _note_missing(self, holder: Any, key: Any) -> None:
        """Before a look-up that makes an entry of a `defaultdict`."""
        if isinstance(holder, collections.defaultdict) and key not in holder:
            self.read_c_attribute(holder, "default_factory")
            self.journal.entry(holder, key, f"{self._title(holder)}[{shown_key(key)}]")

    def _write_item(self, holder: Any, key: Any) -> None:
        if isinstance(holder, torch.Tensor) or self._is_ignored(holder):
            return
        cls = type(holder)
        if isinstance(holder, dict) and (isinstance(cls.__setitem__, types.WrapperDescriptorType) or not is_recorded(cls.__module__)):
            if key in holder or is_simple(key):
                self.journal.entry(holder, key, f"{self._title(holder)}[{shown_key(key)}]")
            else:
                self.mutate(holder)
        else:
            self.mutate(holder)

    def mutate(self, holder: Any) -> None:
        """Before the content of a container changes. The new content depends on the old one, so that counts as read."""
        if isinstance(holder, (collections.UserDict, collections.UserList)):
            holder = self.owned(holder, holder.data)  # type: ignore[arg-type]
        if isinstance(holder, torch.Tensor) or self._is_ignored(holder):
            return
        for each in (holder, *self.memory_of(holder)):
            self.read_content(each)
            self.journal.content(each, self._title(each))


__all__ = ["MEMOS", "WITH_PARTS", "PlacesWritten", "is_kept_in_c"]
