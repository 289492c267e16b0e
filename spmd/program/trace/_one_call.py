"""Objects that a trace creates and returns or stores, and that no call can create anew: a class, a context variable, a `threading.local`.

Python creates another one in every call. So the program returns the object of its trace once, and the next call is a retrace. Objects that
exist once per process, such as a class or module that an import created and registered under its name, count as existing before the trace.
"""

from __future__ import annotations

import contextvars
import copy
import functools
import gc
import itertools
import logging
import sys
import threading
import types
from collections.abc import Callable
from typing import Any

from spmd.program.find._static import is_named, is_python_class
from spmd.program.trace._object_parts import RUNNING

_KINDS = (contextvars.ContextVar, threading.local, functools._lru_cache_wrapper)
_OVER_OTHERS = (itertools.chain, itertools.cycle, itertools.islice, itertools.accumulate, itertools.starmap, itertools.compress)
_WHILE = (itertools.takewhile, itertools.dropwhile, itertools.filterfalse, itertools.zip_longest, itertools.groupby)


class OneCall:
    """The objects of this kind that one trace leaves.

    Attributes:
        titles: a description of each, for messages.
    """

    def __init__(self) -> None:
        self.titles: list[str] = []
        self._was_given = False

    def giving(self, value: Any, title: str) -> Callable[[], Any]:
        """A function that returns `value`, for the only call of the program."""
        self.titles.append(title)

        def give() -> Any:
            self._was_given = True
            return value

        return give

    def guard(self) -> str | None:
        """Why the program cannot run again; None before its only call."""
        return f"every call creates {self.titles[0]} anew, which a program cannot do" if self._was_given else None


def title_of(value: Any) -> str | None:
    """A description of `value`, an object that the trace created, if no call can create it anew; else None."""
    kind: Any = type(value)
    if isinstance(value, type):
        return None if is_named(value) else f"the class {value.__qualname__}"
    if issubclass(kind, types.ModuleType):
        return None if sys.modules.get(value.__name__) is value else f"the module {value.__name__}"
    if issubclass(kind, logging.Logger):
        return None if logging.Logger.manager.loggerDict.get(value.name) is value else f"the logger {value.name}"
    if issubclass(kind, contextvars.ContextVar):
        return f"the context variable {value.name}"
    return _with_article(kind) if issubclass(kind, (*_KINDS, *_OVER_OTHERS, *_WHILE)) else None


def title_of_uncopied(value: Any) -> str | None:
    """The same for an object of the standard library that cannot be copied."""
    kind: Any = type(value)
    if issubclass(kind, RUNNING) or str(kind.__module__).partition(".")[0] not in sys.stdlib_module_names:
        return None
    return _with_article(kind) if gc.is_tracked(value) and not _is_immutable(value) else None


def is_made_class(cls: type) -> bool:
    """Whether a class statement created `cls` outside of an import."""
    return is_python_class(cls) and not is_named(cls)


def _with_article(kind: type) -> str:
    return f"{'an' if kind.__name__[0] in 'aeiouAEIOU' else 'a'} {kind.__name__}"


def _is_immutable(value: Any) -> bool:
    """Whether a copy of `value` is the same object."""
    try:
        return copy.copy(value) is value
    except Exception:  # a class can raise anything when it refuses to be copied
        return False


__all__ = ["OneCall", "is_made_class", "title_of", "title_of_uncopied"]
