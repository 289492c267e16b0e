"""Looks at objects of a user without running their code: no `__getattr__`, no property."""

from __future__ import annotations

import inspect
import threading
import types
from contextlib import suppress
from typing import Any

_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, types.MethodType, type)


def attributes_of(value: Any) -> dict[str, Any] | None:
    """The dict of an object's own attributes; None if it has none."""
    if isinstance(value, threading.local):
        return vars(value)  # this thread's
    try:
        found = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return None
    return found if isinstance(found, dict) else None


def slots_of(value: Any) -> dict[Any, Any]:
    """The slots of an object that are set: their descriptors, with what they hold."""
    found: dict[Any, Any] = {}
    for cls in type(value).__mro__:
        for descriptor in vars(cls).values():
            if isinstance(descriptor, types.MemberDescriptorType):
                with suppress(AttributeError):
                    found[descriptor] = descriptor.__get__(value, type(value))
    return found


def static_attribute(value: Any, name: str, default: Any = None) -> Any:
    """The attribute as it is stored, on the object or its class."""
    return inspect.getattr_static(value, name, default)


def name_of(function: Any) -> str:
    """What a function calls itself; the class's name of another callable."""
    return function.__name__ if isinstance(function, _FUNCTIONS) else type(function).__name__
