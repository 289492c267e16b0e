"""What a trace made and left that no call can make anew: a class, a context variable, a thread's own variables.

Python makes another one in every call. So the program that leaves the one of its trace runs once, and the next call traces again. What
is made once for the whole process counts as found: a class or a module that an import made has its name there.
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

from spmd.program.trace._object_parts import RUNNING

_KINDS = (contextvars.ContextVar, threading.local, functools._lru_cache_wrapper)
_OVER_OTHERS = (itertools.chain, itertools.cycle, itertools.islice, itertools.accumulate, itertools.starmap, itertools.compress)
_WHILE = (itertools.takewhile, itertools.dropwhile, itertools.filterfalse, itertools.zip_longest, itertools.groupby)
_HEAP = 1 << 9  # a class made by Python code


class OneCall:
    """What one trace left of this kind.

    Attributes:
        titles: each, in words.
    """

    def __init__(self) -> None:
        self.titles: list[str] = []
        self._was_given = False

    def giving(self, value: Any, title: str) -> Callable[[], Any]:
        """What gives `value` to the one call of the program."""
        self.titles.append(title)

        def give() -> Any:
            self._was_given = True
            return value

        return give

    def guard(self) -> str | None:
        """Why the program does not run again; None before its call."""
        return f"every call makes {self.titles[0]}, and no program can make it anew" if self._was_given else None


def title_of(value: Any) -> str | None:
    """What `value`, which a trace made, is in words, if it is of this kind; None if it is not."""
    kind: Any = type(value)
    if isinstance(value, type):
        return None if _is_named(value) else f"the class {value.__qualname__}"
    if issubclass(kind, types.ModuleType):
        return None if sys.modules.get(value.__name__) is value else f"the module {value.__name__}"
    if issubclass(kind, logging.Logger):
        return None if logging.Logger.manager.loggerDict.get(value.name) is value else f"the logger {value.name}"
    if issubclass(kind, contextvars.ContextVar):
        return f"the context variable {value.name}"
    return _with_article(kind) if issubclass(kind, (*_KINDS, *_OVER_OTHERS, *_WHILE)) else None


def title_of_uncopied(value: Any) -> str | None:
    """The same for an object of Python's own library that cannot be copied either."""
    kind: Any = type(value)
    if issubclass(kind, RUNNING) or str(kind.__module__).partition(".")[0] not in sys.stdlib_module_names:
        return None
    return _with_article(kind) if gc.is_tracked(value) and not _is_immutable(value) else None


def is_made_class(cls: type) -> bool:
    """Whether Python code makes such a class, and no import made this one."""
    return bool(cls.__flags__ & _HEAP) and not _is_named(cls)


def _with_article(kind: type) -> str:
    return f"{'an' if kind.__name__[0] in 'aeiouAEIOU' else 'a'} {kind.__name__}"


def _is_named(cls: type) -> bool:
    """Whether a class is what its module has under its name, as after an import."""
    found: Any = sys.modules.get(cls.__module__)
    for name in cls.__qualname__.split("."):
        found = vars(found).get(name) if hasattr(found, "__dict__") else None
    return found is cls


def _is_immutable(value: Any) -> bool:
    """Whether it says of itself that a copy is the same object."""
    try:
        return copy.copy(value) is value
    except Exception:  # in its own way
        return False


__all__ = ["OneCall", "is_made_class", "title_of", "title_of_uncopied"]
