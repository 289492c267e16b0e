"""What the instrumented code writes, noted before it happens: variables, attributes, items, contents."""

from __future__ import annotations

import collections
import decimal
import functools
import types
from functools import partial
from typing import Any

import numpy as np
import torch

from spmd.program.find._static import attributes_of
from spmd.program.reads import _calls
from spmd.program.reads._hooks import QUIET
from spmd.program.reads._library import is_librarys_property, is_recorded
from spmd.program.reads._number_place import ABSENT
from spmd.program.reads._outside import setting_of
from spmd.program.reads._places import CDATA, shown_key
from spmd.program.reads._places_read import PlacesRead, is_simple, itself
from spmd.program.reads._process_settings import SETTINGS, Setting
from spmd.program.reads._varying import fixed, fixed_if_varying, with_fixed_keys
from spmd.program.reads._varying_index import may_vary, written_at

WITH_PARTS = (types.FunctionType, functools.partial)  # `__defaults__`, `__code__`
KEPT_IN_C = (types.FunctionType, collections.defaultdict, np.ndarray, decimal.Context)  # names, defaults, shapes, digits
MEMOS = frozenset({"__dynamo_disable"})  # what torch notes on a function when it is first called


class PlacesWritten(PlacesRead):
    """What was read, and what was written.

    Attributes:
        fixes_indices: what is read of a tensor at an index that varies is a view, and the index is guarded by its value.
    """

    fixes_indices = False

    def look_into(self, value: Any) -> None:
        """All of a container, and nothing of what lies in it."""
        raise NotImplementedError

    def look_into_key(self, key: Any) -> None:
        """An array or a list says which items are meant, an object what it is equal to."""
        if type(key) not in QUIET:
            self.look_into(key)
        elif type(key) is tuple:
            for part in key:
                self.look_into(part)

    def store_global(self, variables: dict[str, Any], name: str) -> None:
        self.journal.entry(variables, name, name)

    def store_cell(self, cell: Any, name: str) -> None:
        self.journal.cell(cell, name)

    def store_attr(self, instance: Any, name: str) -> None:
        instance = itself(instance)
        cls = type(instance)
        if name in MEMOS:
            return
        if isinstance(instance, CDATA):
            self.mutate(instance)
            return
        self.meet(cls)
        if isinstance(instance, type):
            self._store_in_class(instance, name)
        elif cls is not types.ModuleType and (question := setting_of(instance, name, self._title(instance))) is not None:
            self.ask(instance, question)
            self.journal.setting(instance, name, question[1], question[2], partial(setattr, instance, name))
        elif isinstance(instance, types.ModuleType):
            self.journal.entry(self.parts(instance, instance.__dict__), name, f"{instance.__name__}.{name}")
        elif isinstance(cls.__setattr__, types.WrapperDescriptorType) or not is_recorded(cls.__module__):
            found = next((c.__dict__[name] for c in cls.__mro__ if name in c.__dict__), None)
            is_in_c = isinstance(found, types.GetSetDescriptorType) and (
                isinstance(instance, (*WITH_PARTS, *KEPT_IN_C)) or name == "__class__"
            )
            is_librarys = is_librarys_property(found) and not isinstance(instance, torch.Tensor)
            if isinstance(found, types.MemberDescriptorType) or is_in_c or is_librarys:
                self.journal.slot(instance, name, found, f"{self._title(instance)}.{name}")
            elif not hasattr(type(found), "__set__"):
                self._store_attribute(instance, name)
        # any other `__setattr__` is Python, and tells when it writes

    def set_setting(self, setting: Setting) -> None:
        """A setting of the whole process is about to be set."""
        self.ask(SETTINGS, setting.question)
        self.journal.setting(SETTINGS, setting.title, setting.title, setting.read, setting.put)

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
        """An item is about to be written; returns the key and the container to use."""
        holder = itself(holder)
        self.look_into_key(key)
        if may_vary(holder, key):
            rows = None if self.fixes_indices else written_at(holder, key)
            if rows is not None:  # of a tensor
                return rows[1], rows[0]
            key = fixed(key)
        self._write_item(holder, key)
        return key, holder

    def delete_item(self, holder: Any, key: Any) -> tuple[Any, Any]:
        """An item is about to be deleted; returns the key and the container to use."""
        holder = itself(holder)
        self.look_into_key(key)
        key = fixed_if_varying(key)
        self._write_item(holder, key)
        if isinstance(holder, dict) and self.journal.is_written(holder, key):
            self.journal.removal(holder, key)
        return key, holder

    def made_with_keys(self, container: Any) -> None:
        """A dict or set was made of keys."""
        with_fixed_keys(container)

    def as_key(self, key: Any) -> Any:
        """A key is about to be put in a dict or set; returns the key to use."""
        return fixed_if_varying(key)

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
        """The content of a container is about to change, depending on what it is."""
        if isinstance(holder, (collections.UserDict, collections.UserList)):
            holder = self.parts(holder, holder.data)  # type: ignore[arg-type]
        if isinstance(holder, torch.Tensor) or self._is_ignored(holder):
            return
        for each in (holder, *_calls.shown_by(holder)):
            self.look_into(each)
            self.journal.content(each, self._title(each))


__all__ = ["KEPT_IN_C", "MEMOS", "WITH_PARTS", "PlacesWritten"]
