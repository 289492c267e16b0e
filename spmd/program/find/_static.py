"""Reads attributes of a user's objects without running the user's code: no `__getattr__`, no property."""

from __future__ import annotations

import gc
import inspect
import sys
import threading
import types
from contextlib import suppress
from typing import Any

_HEAP_TYPE, _IMMUTABLE_TYPE = 1 << 9, 1 << 8  # Py_TPFLAGS_HEAPTYPE, Py_TPFLAGS_IMMUTABLETYPE
_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, types.MethodType, type)


def is_a(value: Any, kinds: type | tuple[type, ...]) -> bool:
    """`isinstance` by the real class of a value: its `__class__` may be a property, which builds an object or raises an error."""
    return issubclass(type(value), kinds)


def attributes_of(value: Any) -> dict[str, Any] | None:
    """The attribute dict of an object; None if it has none."""
    if is_a(value, threading.local):
        return vars(value)  # the dict of the current thread
    try:
        found = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return None
    return found if isinstance(found, dict) else None


def slots_of(value: Any) -> dict[Any, Any]:
    """The values of the slots of an object that are set, by descriptor."""
    found: dict[Any, Any] = {}
    for cls in type(value).__mro__:
        for descriptor in vars(cls).values():
            if isinstance(descriptor, types.MemberDescriptorType) and descriptor.__name__ != "__dict__":  # of a SimpleNamespace
                with suppress(AttributeError):
                    found[descriptor] = descriptor.__get__(value, type(value))
    return found


def is_python_class(cls: type) -> bool:
    """Whether Python code created the class. Classes of C modules may be heap types too (deque since Python 3.12), but immutable ones."""
    return cls.__flags__ & (_HEAP_TYPE | _IMMUTABLE_TYPE) == _HEAP_TYPE


def static_attribute(value: Any, name: str, default: Any = None) -> Any:
    """The attribute as it is stored on the object or its class, without descriptors."""
    return inspect.getattr_static(value, name, default)


def class_dict(cls: type) -> dict[str, Any]:
    """The dict behind the read-only `cls.__dict__`."""
    return gc.get_referents(cls.__dict__)[0]


def named(module: str, qualname: str) -> Any:
    """What a loaded module has under a qualified name; the module for an empty name; None if there is nothing."""
    found: Any = sys.modules.get(module)
    for name in qualname.split(".") if qualname else ():
        found = inspect.getattr_static(found, name, None)
    return found.__func__ if type(found) in (staticmethod, classmethod) else found


def is_named(value: Any) -> bool:
    """Whether the module of a class or function has it under its qualified name, as after an import."""
    return named(value.__module__ or "", value.__qualname__) is value


def name_of(function: Any) -> str:
    """The `__name__` of a function or class; for another callable, the name of its class."""
    return function.__name__ if isinstance(function, _FUNCTIONS) else type(function).__name__
