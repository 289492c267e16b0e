"""The parts of values: what code that is not recorded can reach from a value, and which objects are plain."""

from __future__ import annotations

import abc
import collections
import collections.abc
import functools
import gc
import inspect
import mmap
import types
import typing
import weakref
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from spmd.device._generator import DeviceGenerator
from spmd.program.find._static import attributes_of, is_python_class, slots_of, static_attribute
from spmd.program.reads._exceptions import exceptions_parts
from spmd.program.reads._images import images_in
from spmd.program.reads._library import is_library, is_recorded, keeps_state, settings_of
from spmd.program.reads._places import CDATA, PLAIN

if TYPE_CHECKING:
    from spmd.program.reads._places_read import PlacesRead

WITH_ITEMS = (dict, list, tuple, set, frozenset, collections.deque)
_VIEWS = (np.ndarray, np.flatiter, np.void)
_CONTAINERS = (list, dict, collections.deque, collections.OrderedDict, collections.defaultdict, collections.Counter)
_NOT_PLAIN = (torch.nn.Module, torch.optim.Optimizer, torch.Tensor, type)
_WITHOUT_CODE = (object, *_CONTAINERS, typing.Generic, typing.Protocol, abc.ABC)
_METHODS = (
    *(types.FunctionType, types.MemberDescriptorType, types.GetSetDescriptorType, types.MethodDescriptorType, types.WrapperDescriptorType),
    *(staticmethod, classmethod, types.BuiltinFunctionType, types.ClassMethodDescriptorType),
    type(vars(inspect.FullArgSpec)["args"]),  # of named tuples
)
_WITH_PLACES = (
    dict,
    list,
    collections.deque,
    type,
    types.ModuleType,
    types.FunctionType,
    torch.Tensor,
)  # their parts have places of their own


def memory_owners(value: Any) -> Iterator[Any]:
    """The objects whose memory an array, an iterator over one or a memoryview shares, the nearest first."""
    while value is not None:
        if isinstance(value, CDATA):  # a part of a structure or an array
            value = value._b_base_
        else:
            value = value.obj if isinstance(value, memoryview) else getattr(value, "base", None) if isinstance(value, _VIEWS) else None
        if isinstance(value, mmap.mmap):  # of an `np.memmap`
            return
        if value is not None:
            yield value


def nested(value: Any) -> Iterator[Any]:
    """A value and everything inside it, through tuples, lists and dicts."""
    seen: set[int] = set()
    waiting = [value]
    while waiting:
        part = waiting.pop()
        yield part
        if isinstance(part, (tuple, list, dict)) and id(part) not in seen:
            seen.add(id(part))
            waiting += part.values() if isinstance(part, dict) else part


def with_tuple_items(values: Iterable[Any]) -> Iterator[Any]:
    """The values, those inside tuples among them, and the arrays whose memory arrays among them show."""
    for value in values:
        inside = with_tuple_items(value) if isinstance(value, tuple) else memory_owners(value) if type(value) is np.ndarray else ()
        yield from (value, *inside)


def parts_of(value: Any, recording: PlacesRead) -> list[Any]:
    """The mutable objects that a library can reach directly from `value`."""
    kind = type(value)
    own = _of_own_class(value, kind, recording)
    if issubclass(kind, BaseException):
        return [*exceptions_parts(recording, value), *own]
    if issubclass(kind, dict):
        return [*dict.values(value), *own]
    if issubclass(kind, (collections.UserDict, collections.UserList)):
        return [value.data, *own]
    if issubclass(kind, (list, tuple, collections.deque, set, frozenset)):
        return [*value, *own]
    if issubclass(kind, functools.partial):
        return [value.func, value.args, recording.owned(value, value.keywords)]
    if issubclass(kind, types.MethodType):
        return [] if isinstance(value.__self__, torch.nn.Module) else [value.__self__]
    if issubclass(kind, (types.BuiltinMethodType, types.MethodWrapperType)):
        return [] if isinstance(value.__self__, (type, types.ModuleType)) else [value.__self__]
    if issubclass(kind, (torch.Tensor, type, types.FunctionType, types.ModuleType)):
        return []
    if images := images_in(value):
        return images
    for name in settings_of(kind):
        recording._entry(attributes_of(value) or {}, name, value, ".")
    is_container = issubclass(kind, (collections.abc.Mapping, collections.abc.Sequence, collections.abc.Set))
    if issubclass(kind, Iterator) or (is_library(kind.__module__) and not (is_container or keeps_state(kind))):
        return []
    kept = [part for part in slots_of(value).values() if not isinstance(part, PLAIN)] if keeps_state(kind) else []
    for part in kept:
        if not gc.is_tracked(part):  # nothing else says when it was made; another object may have been there before `value`
            recording.owned(value, part)
    attributes = None if own else recording.attributes(value)
    return [*([] if attributes is None else [attributes]), *kept, *own]


def _of_own_class(value: Any, kind: type, recording: PlacesRead) -> list[Any]:
    """The attributes of an object of a class of the user's: its dict, and what is in its slots, which are recorded as read."""
    if not is_python_class(kind) or is_library(kind.__module__) or issubclass(kind, (torch.Tensor, type)):
        return []
    slots = slots_of(value)
    for descriptor in slots:
        recording.read_slot(value, descriptor)
    attributes = recording.attributes(value)
    return [*([] if attributes is None else [attributes]), *slots.values()]


@functools.cache
def inherits_state(cls: type) -> bool:
    """Whether a class of the user's inherits from one of Python's own classes whose methods read attributes of the object."""
    if not is_recorded(cls.__module__):
        return False
    bases = [base for base in cls.__mro__ if is_python_class(base) and is_library(base.__module__) and not is_recorded(base.__module__)]
    return any(keeps_state(base) and not {"__init__", "__new__"}.isdisjoint(vars(base)) for base in bases)


def is_data(value: Any) -> bool:
    """Whether a value is a list, a dict, a deque, a plain object of the user's, or a generator of the device.

    All that code reads of it is recorded.
    """
    cls = type(value)
    if cls in _CONTAINERS or cls in (types.SimpleNamespace, DeviceGenerator):
        return True
    if isinstance(value, (*PLAIN, *_NOT_PLAIN)) or base_of(value) not in (object, *_CONTAINERS):
        return False
    return not any(is_library(base.__module__) for base in cls.__mro__ if base not in _WITHOUT_CODE)


def is_recorded_descriptor(found: Any) -> bool:
    """Whether all that an attribute of a class reads of an object, when it is looked up on the object, is recorded."""
    cls = type(found)
    if not hasattr(cls, "__get__") or cls in _METHODS or found is DeviceGenerator.device:
        return True
    if cls is property or cls is functools.cached_property:
        fn = found.fget if cls is property else found.func
        return type(fn) is types.FunctionType and is_recorded(fn.__module__)
    return type(static_attribute(cls, "__get__")) is types.FunctionType and is_recorded(cls.__module__)


def is_sized(value: Any) -> bool:
    """Whether a value is a list or deque whose class does not define another length."""
    return isinstance(value, (list, collections.deque)) and type(value).__len__ in (list.__len__, collections.deque.__len__)


def is_python(iterator: Any) -> bool:
    """Whether an iterator's `__next__` is instrumented Python code, so that its reads and writes are recorded."""
    cls: Any = type(iterator)
    return is_recorded(cls.__module__) and type(getattr(cls, "__next__", None)) is types.FunctionType


def base_of(value: Any) -> type:
    """The first base of the class of an object that is written in C: `object` if the object consists of attributes alone."""
    return next(base for base in type(value).__mro__ if not is_python_class(base))


def objects_in(value: Any, with_attributes: bool = False, with_tensors: bool = False) -> Iterator[Any]:
    """The plain objects in a value: itself, and those inside tuples, containers, bound methods and, if asked for, plain objects.

    Args:
        value: the value.
        with_attributes: search the attributes of plain objects too.
        with_tensors: yield tensors too.
    """
    seen: set[int] = set()
    waiting = [value]
    while waiting:
        part = waiting.pop()
        if id(part) in seen:
            continue
        seen.add(id(part))
        if isinstance(part, torch.Tensor):  # first: lists of tensors are long
            if with_tensors:
                yield part
            continue
        if isinstance(part, PLAIN):
            continue
        if is_data(part):
            yield part
            if with_attributes:
                waiting += (*(attributes_of(part) or {}).values(), *slots_of(part).values())
        if isinstance(part, dict):
            waiting += (*dict.keys(part), *dict.values(part))
        elif isinstance(part, WITH_ITEMS):
            waiting += part
        elif isinstance(part, types.MethodType):
            waiting.append(part.__self__)


def inside_c(value: Any) -> Iterator[Any]:
    """The objects that an object of C code refers to, also weakly and through others: they have no places."""
    seen, waiting = {id(value)}, [value]
    while waiting:
        outer = waiting.pop()
        if isinstance(outer, (*PLAIN, *_WITH_PLACES)) or base_of(outer) is object:
            continue
        referent = outer() if isinstance(outer, weakref.ReferenceType) else None
        for part in (*gc.get_referents(outer), referent):
            if part is not None and id(part) not in seen:
                seen.add(id(part))
                waiting.append(part)
                yield part


__all__ = [
    "WITH_ITEMS",
    "inherits_state",
    "inside_c",
    "is_data",
    "is_python",
    "is_recorded_descriptor",
    "is_sized",
    "memory_owners",
    "nested",
    "objects_in",
    "parts_of",
    "with_tuple_items",
]
