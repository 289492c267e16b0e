"""Every function outside the libraries asks for its instrumented code while a recording runs, and has its own again afterwards."""

from __future__ import annotations

import sys
import types
from collections import defaultdict
from typing import Any

from spmd.program.reads import _hooks
from spmd.program.reads._heap import HEAP
from spmd.program.reads._instrument import Instrumenter

_functions: defaultdict[int, list[types.FunctionType]] = defaultdict(list)  # while swapped: by id of the original code


def code_of(fn: types.FunctionType) -> types.CodeType:
    """The function's own code, also while it is swapped."""
    return _INSTRUMENTER.original.get(id(fn.__code__), fn.__code__)


def swap() -> list[tuple[types.FunctionType, types.CodeType]]:
    """Give every function of the user's a stub; returns what `restore` needs."""
    swapped: list[tuple[types.FunctionType, types.CodeType]] = []
    for fn in list(HEAP.functions):
        code = fn.__code__
        if id(code) not in _INSTRUMENTER.original:
            swapped.append((fn, code))
            _functions[id(code)].append(fn)
            fn.__code__ = _INSTRUMENTER.stub(code)
    return swapped


def restore(swapped: list[tuple[types.FunctionType, types.CodeType]]) -> None:
    """Undo `swap`."""
    _functions.clear()
    for fn, code in swapped:
        if id(fn.__code__) in _INSTRUMENTER.original:  # the user's program may have given it another
            fn.__code__ = code


def _entered(code: types.CodeType, closure: tuple[Any, ...], args: list[Any], kwargs: dict[str, Any]) -> Any:
    """A stub was called: rewrite the code, for the next calls too."""
    made = _INSTRUMENTER.instrumented(code)
    for fn in _functions.get(id(code), ()):
        if _INSTRUMENTER.original.get(id(fn.__code__)) is code:
            fn.__code__ = made
    fn = types.FunctionType(made, sys._getframe(1).f_globals, code.co_name, None, closure or None)
    return fn(*args, **kwargs)


_INSTRUMENTER = Instrumenter(_hooks.HOOKS, _entered)
