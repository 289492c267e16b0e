"""What functions and classes are made of, as the code that runs or inspects them reads it: code, defaults, annotations, fields, names.

A function that Python calls without an instruction that names it (`__new__`, a property's getter) is recorded where its descriptor is
read. Functions of Python's library that inspect others (`inspect.signature`, `typing.get_type_hints`, `functools.wraps`,
`dataclasses.fields`) also read their annotations, names and fields.
"""

from __future__ import annotations

import collections
import decimal
import functools
import inspect
import types
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, cast

import torch

from spmd.program.find._static import attributes_of, is_python_class, slots_of
from spmd.program.reads._exceptions import read_exception_text
from spmd.program.reads._library import defines_tuples, is_library, is_recorded
from spmd.program.reads._memos import GENERIC, read_registry
from spmd.program.reads._places import ContentPlace
from spmd.program.reads._source_text import note_text
from spmd.program.reads._trace_errors import refused

if TYPE_CHECKING:
    from spmd.program.reads._places_read import PlacesRead
    from spmd.program.reads._recorder import Recording

_INSIDE: dict[type, Callable[[Any], tuple[Any, ...]]] = {  # the functions inside a descriptor
    staticmethod: lambda held: (held.__func__,),
    classmethod: lambda held: (held.__func__,),
    property: lambda held: (held.fget, held.fset, held.fdel),
    types.DynamicClassAttribute: lambda held: (held.fget, held.fset, held.fdel),
    functools.cached_property: lambda held: (held.func,),
    functools.partialmethod: lambda held: (held.func,),
    types.MethodType: lambda held: (held.__func__,),
}
_INSPECTING = frozenset(("inspect", "typing", "dataclasses", "pydoc"))
_NAMES = ("__name__", "__qualname__", "__module__", "__doc__")


def read_function(recording: PlacesRead, value: Any) -> None:
    """Record the code and the defaults of a function, or of the functions in a descriptor, unless they are a library's."""
    kind = type(value)
    if kind is types.FunctionType:
        if is_recorded(value.__module__) or defines_tuples(value.__module__):
            recording._title_of(value, value.__qualname__)
            recording._content(value)
            if value.__code__.co_filename == GENERIC:
                read_registry(cast("Recording", recording), value)
    elif kind in _INSIDE:
        for fn in _INSIDE[kind](value):
            if type(fn) is functools.partial:
                recording._whole_dict(recording.owned(fn, fn.keywords))
                fn = fn.func
            read_function(recording, fn)
        if kind is functools.partialmethod:
            recording._whole_dict(recording.owned(value, value.__dict__))
            recording._whole_dict(recording.owned(value, value.keywords))


def note_inspection(recording: Recording, fn: types.FunctionType, args: tuple[Any, ...]) -> None:
    """Record what a function of Python's library reads that inspects its arguments; nothing for other functions."""
    if fn is functools.update_wrapper or fn is functools.wraps:
        for arg in args:
            if isinstance(arg, types.FunctionType):
                recording.read_content(recording.owned(arg, arg.__dict__))
            _inspect(recording, arg)
    elif fn.__module__ == "traceback":
        for arg in args:
            read_text_of(recording, arg)
    elif fn.__module__ not in _INSPECTING:
        return
    elif fn is inspect.getattr_static and len(args) >= 2:
        recording.load_attr(args[0], args[1])
    elif fn.__module__ == "dataclasses":
        for arg in args:
            _read_fields(recording, arg)
    else:
        for arg in args:
            _inspect(recording, arg)
            if fn is inspect.getclosurevars:
                _read_variables(recording, inspect.unwrap(arg))
            elif fn.__name__.startswith("getmembers") and isinstance(arg, (types.ModuleType, torch.nn.Module)):
                recording.read_content(recording.attributes(arg))


def _inspect(recording: Recording, value: Any) -> None:
    """Record the annotations, the names and the signature of a function, a class or a module, and of what it wraps."""
    while value is not None:
        if isinstance(value, functools.partial):
            value = value.func
            continue
        if isinstance(value, types.MethodType):
            value = value.__func__
        if isinstance(value, type):
            for base in value.__mro__:
                if is_python_class(base) and not is_library(base.__module__):
                    recording.read_classes(base)
                    _read_annotations(recording, base, vars(base).get("__annotations__"))
            for name in ("__init__", "__new__"):
                _inspect(recording, next((vars(base)[name] for base in value.__mro__ if name in vars(base)), None))
            return
        if isinstance(value, (staticmethod, classmethod)):
            value = value.__func__
        if isinstance(value, types.ModuleType):
            _read_annotations(recording, value, vars(value).get("__annotations__"))
            return
        if not isinstance(value, types.FunctionType):
            return
        for name in (*_NAMES, "__annotations__", "__signature__"):
            recording.load_attr(value, name)
        recording.read_function(value)
        _read_annotations(recording, value, _annotations_of(value))
        recording.load_attr(value, "__wrapped__")
        value = value.__dict__.get("__wrapped__")


def _annotations_of(fn: types.FunctionType) -> Any:
    try:
        return fn.__annotations__
    except Exception:  # they are evaluated when they are read first; the traced function gets the error from its own read
        return None


def _read_annotations(recording: Recording, owner: Any, annotations: Any) -> None:
    if not isinstance(annotations, dict):
        return
    recording.read_content(recording.owned(owner, annotations))
    variables = getattr(owner, "__globals__", None)
    for text in annotations.values():
        if isinstance(text, str) and variables is not None:  # `typing.get_type_hints` evaluates it
            note_text(recording, text, variables)


def _read_variables(recording: Recording, fn: Any) -> None:
    """Record the variables that a function names."""
    if isinstance(fn, types.FunctionType):
        for name, cell in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True):
            recording.load_cell(cell, name)
        for name in fn.__code__.co_names:
            recording.load_global(fn.__globals__, name)


def _read_fields(recording: Recording, value: Any) -> None:
    """Record the fields of a dataclass: which there are, and what each is."""
    for owner in _dataclasses_in(value, set()):
        recording._whole_dict(recording.owned(owner, owner.__dataclass_fields__))
        key = hash(("fields", id(owner)))
        if key not in recording.places:
            recording.places[key] = ContentPlace(owner, f"the fields of {owner.__qualname__}", functools.partial(_fields_of, owner))


def _fields_of(cls: Any) -> tuple[Any, ...]:
    return tuple(
        (field, field.name, field.init, field._field_type, field.default, field.default_factory, field.metadata)
        for field in vars(cls).get("__dataclass_fields__", {}).values()
    )


def _dataclasses_in(value: Any, seen: set[int]) -> Iterator[Any]:
    """The classes of the user's dataclasses in a value: `asdict` also converts the objects inside."""
    if id(value) in seen:
        return
    seen.add(id(value))
    cls = value if isinstance(value, type) else type(value)
    owner = next((base for base in cls.__mro__ if "__dataclass_fields__" in vars(base)), None)
    if owner is not None and not is_library(owner.__module__):
        yield owner
        for part in () if isinstance(value, type) else (*(attributes_of(value) or {}).values(), *slots_of(value).values()):
            yield from _dataclasses_in(part, seen)
    elif isinstance(value, (list, tuple, dict)):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _dataclasses_in(part, seen)


def read_text_of(recording: Recording, value: Any) -> None:
    """Record what the text of a function, a class or an object without a text of its own shows: names."""
    if isinstance(value, types.MethodType):
        value = value.__func__
    if isinstance(value, types.FunctionType):
        recording.load_attr(value, "__qualname__")
        return
    if isinstance(value, decimal.Context):
        raise refused("the text of a decimal.Context, with the flags that earlier operations raised")
    cls: Any = value if isinstance(value, type) else type(value)
    if isinstance(value, BaseException):
        read_exception_text(recording, value)
    elif isinstance(value, collections.defaultdict):
        recording.read_c_attribute(value, "default_factory")
    elif isinstance(value, tuple) and hasattr(cls, "_fields"):
        recording.load_attr(cls, "__name__")
    if (isinstance(value, type) or cls.__repr__ is object.__repr__) and is_python_class(cls) and not is_library(cls.__module__):
        for name in ("__qualname__", "__module__"):
            recording.load_attr(cls, name)


__all__ = ["note_inspection", "read_function", "read_text_of"]
