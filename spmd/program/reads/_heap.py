"""What exists in this process, asked of Python's garbage collector: the functions, and which objects a trace made.

Note [Frozen between traces]
    A list of all objects costs as much as tracing a small function, and most of them were there at the last trace. After a trace
    they stay where `gc.freeze` puts them, so that the next one is shown only what was made since. A full collection takes them
    back first (`before_collection`): no garbage is kept that would have been collected, and `gc.get_objects()` after `gc.collect()`
    shows whoever looks for a leak what there is. A process that froze objects itself gets what it had: all is looked at in every
    trace, and frozen again afterwards.
"""

from __future__ import annotations

import gc
import types
import weakref
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

from spmd.program.reads._library import is_recorded

_MAX_DEAD = 1000  # references to functions that are gone


class Heap:
    """The functions of the user's that exist, found at each trace among what was made since the last one."""

    def __init__(self) -> None:
        self._functions: dict[int, weakref.ref[types.FunctionType]] = {}  # by id; a WeakSet is ten times as slow to go through
        self._library: dict[int, types.CodeType] = {}  # code of libraries, by id: a look at each function's module would cost more
        self._is_kept = False  # what is frozen was frozen here
        self._last: list[Any] = []  # made after the freeze: it is shown unless somebody else froze since
        self._was_frozen = False  # somebody else froze objects
        self._depth = 0

    def functions(self) -> list[types.FunctionType]:
        """Those that are alive, also what was made since the last trace."""
        self._find_functions()
        found = [fn for ref in self._functions.values() if (fn := ref()) is not None]
        if len(found) < len(self._functions) - _MAX_DEAD:
            self._functions = {id(fn): self._functions[id(fn)] for fn in found}
        return found

    def _find_functions(self) -> None:
        found = gc.get_objects()
        is_ours = self._is_kept and any(o is self._last for o in found)
        self._was_frozen = not is_ours and gc.get_freeze_count() > 0  # it counts them one by one
        if self._was_frozen:
            gc.unfreeze()
            found = gc.get_objects()
        kind, library = types.FunctionType, self._library
        for fn in [o for o in found if type(o) is kind and id(o.__code__) not in library]:
            if is_recorded(fn.__module__):
                known = self._functions.get(id(fn))
                if known is None or known() is not fn:
                    self._functions[id(fn)] = weakref.ref(fn)
            else:
                library[id(fn.__code__)] = fn.__code__

    @contextmanager
    def set_apart(self) -> Generator[None]:
        """While active, what exists now is on another list than what is made, so that `made` tells them apart."""
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
            self._last = [self]

    def made(self) -> frozenset[int]:
        """The ids of the objects that exist now and were made since `set_apart`."""
        return frozenset(map(id, gc.get_objects()))

    def before_collection(self, phase: str, info: dict[str, int]) -> None:
        """A full collection looks at everything."""
        if self._is_kept and not self._depth and phase == "start" and info["generation"] == 2:
            gc.unfreeze()
            self._is_kept = False


HEAP = Heap()


def made_in_trace(value: Any) -> bool:
    """Whether an object was made since the trace began. Python's collector knows objects that can hold others; no other counts as made."""
    return id(value) in HEAP.made()


__all__ = ["HEAP", "made_in_trace"]
