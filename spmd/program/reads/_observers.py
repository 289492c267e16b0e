"""Functions that Python calls on its own while a trace runs: signal handlers, and hooks of the collector, of audit events and of debuggers.

Note [Observers]
    Such a function is not called by the traced function, so what it reads and writes is no part of the trace: it is neither guarded, nor
    undone, nor repeated by each call. It runs its original code, and so does all that it calls (`_hooks.run_apart`). So it also sees the
    audit events that a recording itself causes, and instruments nothing, which would cause more of them.

    Python shows all observers but audit hooks. Those are found by an audit event of our own, which none of them receives. Their stubs
    decide at every call, by the arguments, whether Python calls them. Trace and profile functions are replaced meanwhile, because they
    may return any function to be called for the lines of a frame.
"""

from __future__ import annotations

import functools
import gc
import signal
import sys
import threading
import types
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

from spmd.program.reads._hooks import run_apart
from spmd.program.reads._library import starts_trace

_EVENT = "spmd.recorded"
_PHASES = frozenset(("start", "stop"))
_SIGNALS = sorted(signal.valid_signals())


class Observers:
    """The observers of this process.

    Attributes:
        codes: their code, by id. Audit hooks stay: Python cannot remove one.
    """

    def __init__(self) -> None:
        self.codes: dict[int, types.CodeType] = {}
        self._audit_hooks: dict[int, types.CodeType] = {}
        self._tracers: list[types.CodeType] = []  # of the trace and profile functions
        self._searching: set[int] = set()  # ids of threads

    def find(self) -> None:
        """Find the observers of now, before functions are swapped."""
        found = [*gc.callbacks, *map(signal.getsignal, _SIGNALS)]
        functions = [fn for fn in map(_function_of, found) if fn is not None]
        self._tracers = [fn.__code__ for fn in map(_function_of, (sys.gettrace(), sys.getprofile())) if fn is not None]
        self.codes = {id(code): code for code in (*self._audit_hooks.values(), *(fn.__code__ for fn in functions))}

    def find_audit_hooks(self) -> None:
        """Find the audit hooks, while functions are swapped: `is_observer` receives the calls of their stubs."""
        self._searching.add(threading.get_ident())
        try:
            sys.audit(_EVENT)
        finally:
            self._searching.discard(threading.get_ident())

    def is_searched_for(self, code: types.CodeType, args: list[Any]) -> bool:
        """Whether a stub was called by `find_audit_hooks`; its function is an audit hook, and shall not run."""
        if not self._searching or threading.get_ident() not in self._searching or args[-2:] != [_EVENT, ()]:
            return False
        self._audit_hooks[id(code)] = self.codes[id(code)] = code
        return True

    def is_observer(self, code: types.CodeType, args: list[Any]) -> bool:
        """Whether Python calls a function with this code and these arguments on its own, and not the traced function."""
        if self._tracers and self._is_in_tracer():
            return True
        if id(code) not in self.codes or len(args) < 2:
            return False
        event, last = args[-2:]
        return (
            (isinstance(event, int) and type(last) is types.FrameType)
            or (type(event) is str and type(last) is dict and event in _PHASES)
            or (type(event) is str and type(last) is tuple and id(code) in self._audit_hooks)
        )

    def _is_in_tracer(self) -> bool:
        """Whether a trace function runs: a debugger gives itself to frames (`frame.f_trace`) that it was not called for."""
        frame: types.FrameType | None = sys._getframe(1)
        while frame is not None and not starts_trace(frame):
            if any(frame.f_code is code for code in self._tracers):
                return True
            frame = frame.f_back
        return False


class _Apart:
    """A trace or profile function that runs apart, as does the function that it returns for a frame."""

    __slots__ = ("_fn",)

    def __init__(self, fn: Any) -> None:
        self._fn = fn

    def __call__(self, frame: types.FrameType, event: str, arg: Any) -> Any:
        found = run_apart(self._fn, frame, event, arg)
        return self if found == self._fn else found if found is None or type(found) is _Apart else _Apart(found)


@contextmanager
def trace_functions_apart() -> Generator[None]:
    """While active, the trace and profile functions of this thread run apart. Those in C, of coverage and cProfile, stay."""
    tools: list[tuple[Callable[[], Any], Callable[[Any], None]]] = [(sys.gettrace, sys.settrace), (sys.getprofile, sys.setprofile)]
    replaced = [(get, put, fn, _Apart(fn)) for get, put in tools if _function_of(fn := get()) is not None]
    for _, put, _, ours in replaced:
        put(ours)
    try:
        yield
    finally:
        for get, put, fn, ours in replaced:
            if get() is ours:  # a debugger may have ended meanwhile
                put(fn)


def _function_of(called: Any) -> types.FunctionType | None:
    """The function that a call of this object runs; None if it is no Python code."""
    while isinstance(called, (types.MethodType, functools.partial)):
        called = called.__func__ if isinstance(called, types.MethodType) else called.func
    if type(called) is not types.FunctionType:
        called = getattr(type(called), "__call__", None)  # noqa: B004
    return called if type(called) is types.FunctionType else None


__all__ = ["Observers", "trace_functions_apart"]
