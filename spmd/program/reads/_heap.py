"""Finds functions, and the objects that a trace created, through Python's garbage collector.

`gc.freeze` moves all objects that exist into the permanent generation, which `gc.get_objects` does not list. A trace freezes them at its
start, so the objects listed at its end are those that the trace created.

Note [Frozen between traces]
    To list all objects of the process takes as long as to trace a small function, and most of them existed at the last trace. So they
    stay frozen after a trace, and the next trace lists only objects created since. A full collection unfreezes them first
    (`before_collection`). So garbage is collected as without us, and a search for leaks by `gc.collect()` and `gc.get_objects()` sees all
    objects. If the process itself has frozen objects, every trace lists all objects, and freezes them again afterwards.
"""

from __future__ import annotations

import gc
import types
import weakref
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

from spmd.base._live_objects import live_ids, live_instances
from spmd.program.reads._library import is_recorded

_MAX_DEAD = 1000  # dead weak references before a cleanup


class Heap:
    """The functions outside the libraries that exist. Each trace searches only the objects created since the last one."""

    def __init__(self) -> None:
        self._functions: dict[int, weakref.ref[types.FunctionType]] = {}  # by id; iterating over a WeakSet is ten times as slow
        self._library: dict[int, types.CodeType] = {}  # code of libraries, by id; cheaper than a check of each function's module
        self._is_kept = False  # the frozen objects were frozen here
        self._last: Callable[[], None] = _marker()  # created after our freeze: listed unless other code has frozen objects since
        self._was_frozen = False  # other code froze objects
        self._depth = 0

    def functions(self) -> list[types.FunctionType]:
        """The functions that are alive, including those created since the last trace."""
        self._find_functions()
        found = [fn for ref in self._functions.values() if (fn := ref()) is not None]
        if len(found) < len(self._functions) - _MAX_DEAD:
            self._functions = {id(fn): self._functions[id(fn)] for fn in found}
        return found

    def _find_functions(self) -> None:
        found = live_instances(types.FunctionType)
        is_ours = self._is_kept and any(fn is self._last for fn in found)
        self._was_frozen = not is_ours and gc.get_freeze_count() > 0  # last, because it counts the frozen objects one by one
        if self._was_frozen:
            gc.unfreeze()
            found = live_instances(types.FunctionType)
        library = self._library
        for fn in [fn for fn in found if id(fn.__code__) not in library]:
            if is_recorded(fn.__module__):
                known = self._functions.get(id(fn))
                if known is None or known() is not fn:
                    self._functions[id(fn)] = weakref.ref(fn)
            else:
                library[id(fn.__code__)] = fn.__code__

    @contextmanager
    def set_apart(self) -> Generator[None]:
        """Freeze the objects that exist now, so that `made` lists only objects created in this block."""
        if self.before_collection not in gc.callbacks:
            gc.callbacks.append(self.before_collection)
        gc.freeze()
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
            if self._was_frozen:
                gc.freeze()
            self._is_kept = not self._was_frozen
            self._last = _marker()

    def made(self) -> frozenset[int]:
        """Ids of the objects that were created since `set_apart` and are alive."""
        return live_ids()

    def before_collection(self, phase: str, info: dict[str, int]) -> None:
        """Callback of the garbage collector: a full collection includes the frozen objects."""
        if self._is_kept and not self._depth and phase == "start" and info["generation"] == 2:
            gc.unfreeze()
            self._is_kept = False


def _marker() -> Callable[[], None]:
    return lambda: None


HEAP = Heap()


def made_in_trace(value: Any) -> bool:
    """Whether an object was created since the trace began; False for objects that the collector does not track (plain values)."""
    return id(value) in HEAP.made()


__all__ = ["HEAP", "made_in_trace"]
