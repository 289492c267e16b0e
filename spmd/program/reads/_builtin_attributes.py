"""Attributes of objects of Python's own types (modules, cells, methods, generators, code), and those that methods in C give and take."""

from __future__ import annotations

import itertools
import sys
import types
import typing
from typing import TYPE_CHECKING, Any

from spmd.program.find._static import static_attribute
from spmd.program.reads._outside import setting_of
from spmd.program.reads._trace_errors import refused

if TYPE_CHECKING:
    from spmd.program.reads._places_read import PlacesRead
    from spmd.program.reads._recorder import Recording

_OF_GENERATORS = ("gi_frame", "gi_running", "gi_yieldfrom", "gi_suspended")
_OF_METHODS = ("__self__", "__func__", "__call__", "__get__")
_INSTRUMENTED = frozenset(("co_code", "co_consts", "co_names", "co_stacksize", "co_lnotab", "co_linetable", "co_exceptiontable"))
_METHODS_IN_C = (types.MethodDescriptorType, types.WrapperDescriptorType)
_ALIASES = (types.GenericAlias, *(kind for kind in (getattr(typing, "_GenericAlias", None),) if kind is not None))  # `Holder[int]`


def note_builtin_attribute(recording: Recording, instance: Any, name: str) -> None:
    """Record the read of an attribute of an object of a type in `builtins`."""
    cls = type(instance)
    if cls is types.MethodType:
        if name not in _OF_METHODS:
            recording.load_attr(instance.__func__, name)
    elif cls is types.CellType:
        recording.load_cell(instance, f"{recording.name_of(instance)}.{name}")
    elif cls is types.GeneratorType and name in _OF_GENERATORS:
        recording.advance(instance, f"asked for its {name}")
    elif cls is types.CodeType and name in _INSTRUMENTED:
        raise refused(f"{name} of code, which is another one during a trace")


def read_module_attribute(recording: PlacesRead, module: types.ModuleType, name: str) -> None:
    """Record the read of an attribute of a module: an entry of its dict, what its `__getattr__` gives, or a module of a package."""
    variables = recording.owned(module, module.__dict__)
    if type(module) is not types.ModuleType:
        recording.ask(module, setting_of(module, name, module.__name__))
    recording._entry(variables, name, module, ".")
    if name not in variables:
        recording._entry(variables, "__getattr__", module, ".")
        recording._entry(sys.modules, f"{module.__name__}.{name}", "sys.modules", "[")  # `from package import module`


def note_missing_attribute(recording: Recording, instance: Any, name: str) -> None:
    """Record what gives an attribute that is neither in an object nor in its class.

    It is a setting, or `__getattr__` gives it. One in Python records its own reads. One in C, as here, is noted like a call of it:

        class Config(dict):
            __getattr__ = dict.__getitem__
    """
    recording.ask(instance, setting_of(instance, name, recording.name_of(instance)))
    getter = static_attribute(type(instance), "__getattr__")
    if isinstance(getter, _METHODS_IN_C):
        recording.call(getter, instance, name)


def note_attribute_written_in_c(recording: Recording, instance: Any, name: str) -> bool:
    """Record the write of an attribute by a method in C, like a call of it. Returns whether `__setattr__` is one.

    class Config(dict):
        __setattr__ = dict.__setitem__
        __delattr__ = dict.__delitem__
    """
    methods = [static_attribute(type(instance), special) for special in ("__setattr__", "__delattr__")]
    found = [isinstance(m, _METHODS_IN_C) and m.__name__ not in ("__setattr__", "__delattr__") for m in methods]
    for method in itertools.compress(methods, found):
        recording.call(method, instance, name)
    return found[0]


def origin_of(value: Any) -> Any:
    """The class that a generic alias stands for, `Holder` of `Holder[int]`; any other value itself."""
    return value.__origin__ if type(value) in _ALIASES else value


__all__ = ["note_attribute_written_in_c", "note_builtin_attribute", "note_missing_attribute", "origin_of", "read_module_attribute"]
