"""Swaps the code of all functions outside the libraries while a recording runs, and restores it afterwards.

The replacement is a stub, which instruments the function when it is first called, or the instrumented code itself. A process that has
imported transformers and peft has ten thousand such functions, and each trace swaps them all. So the loops over all functions run in C
(`map`), and replacements are looked up only for functions that did not exist at the last trace. When several recordings follow each
other, functions stay swapped in between (`reads.recorded_together`).
"""

from __future__ import annotations

import functools
import itertools
import operator
import sys
import types
from collections import defaultdict, deque
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch

from spmd.program.reads import _hooks
from spmd.program.reads._heap import HEAP
from spmd.program.reads._instrument import Instrumenter
from spmd.program.reads._module_reads import REPLACEMENTS
from spmd.program.reads._observers import Observers

_codes_of = operator.attrgetter("__code__")


class Swapped:
    """Functions whose code was swapped.

    Attributes:
        functions: the functions.
        codes: the original code of each.
        replacements: the code that each got: a stub, or instrumented code if its stub was called before.
    """

    def __init__(self, functions: list[types.FunctionType]) -> None:
        self.functions = functions
        self.codes: list[types.CodeType] = list(map(_codes_of, functions))
        codes, replacements = _last[0]
        num = _num_common(self.codes, codes)
        self.replacements = [*replacements[:num], *_INSTRUMENTER.replacements(self.codes[num:])]

    @functools.cached_property
    def _by_code(self) -> tuple[dict[int, types.FunctionType], dict[int, list[types.FunctionType]]]:
        """By id of an original code: one function that has it, and all other functions that have it."""
        keys = list(map(id, self.codes))
        one = dict(zip(keys, self.functions, strict=True))
        others: defaultdict[int, list[types.FunctionType]] = defaultdict(list)
        if len(one) < len(keys):
            is_other = map(operator.is_not, map(one.__getitem__, keys), self.functions)
            for index in itertools.compress(range(len(keys)), is_other):
                others[keys[index]].append(self.functions[index])
        return one, others

    def with_code(self, code: types.CodeType) -> list[types.FunctionType]:
        """The functions whose original code is `code`."""
        one, others = self._by_code
        return [one[id(code)], *others.get(id(code), ())] if id(code) in one else []


_swapped: list[Swapped] = []  # of the active recordings, the innermost last
_last: list[tuple[list[types.CodeType], list[types.CodeType]]] = [([], [])]  # codes and their replacements in the last recording


def code_of(fn: types.FunctionType) -> types.CodeType:
    """The function's original code, also while it is swapped."""
    return _INSTRUMENTER.original.get(id(fn.__code__), fn.__code__)


def swap(functions: list[types.FunctionType]) -> Swapped:
    """Replace the code of every function that is not swapped already. Pass the result to `restore`."""
    if _swapped:
        is_ours = map(_INSTRUMENTER.original.__contains__, map(id, map(_codes_of, functions)))
        functions = list(itertools.compress(functions, map(operator.not_, is_ours)))
    else:
        _find_observers()
    swapped = Swapped(functions)
    _swapped.append(swapped)
    _set_codes(functions, swapped.replacements)
    if len(_swapped) == 1:
        _OBSERVERS.find_audit_hooks()
    return swapped


def _find_observers() -> None:
    """Find the observers, whose stubs decide at every call whether it is recorded. See Note [Observers]."""
    _OBSERVERS.find()
    if any([_INSTRUMENTER.stub_again(code) for code in _OBSERVERS.codes.values()]):
        _last[0] = [], []


def restore(swapped: Swapped) -> None:
    """Undo `swap`, except for functions whose `__code__` the user's program has assigned in the meantime."""
    _swapped.remove(swapped)
    functions, codes, replacements = swapped.functions, swapped.codes, swapped.replacements
    now: list[types.CodeType] = list(map(_codes_of, functions))
    is_ours = list(map(operator.is_, now, replacements))
    if not all(is_ours):
        for index in itertools.compress(range(len(now)), map(operator.not_, is_ours)):
            original = code_of(functions[index])
            is_ours[index] = original is codes[index]
            if is_ours[index]:
                replacements[index] = now[index]  # its stub was called and became instrumented code
            else:
                functions[index].__code__ = original  # the user assigned the code of another function, which may be swapped too
        functions, codes = list(itertools.compress(functions, is_ours)), list(itertools.compress(codes, is_ours))
    if not _swapped:
        _last[0] = swapped.codes, replacements
    _set_codes(functions, codes)


@contextmanager
def recorded_together() -> Generator[None]:
    """Keep functions swapped between the recordings in this block: a swap of ten thousand functions takes as long as a small trace."""
    swapped = swap(HEAP.functions())
    try:
        yield
    finally:
        restore(swapped)


def _num_common(codes: list[types.CodeType], others: list[types.CodeType]) -> int:
    """Length of the common prefix."""
    is_same = list(map(operator.is_, codes, others))
    return len(is_same) if all(is_same) else is_same.index(False)


def _set_codes(functions: list[types.FunctionType], codes: list[types.CodeType]) -> None:
    deque(map(setattr, functions, itertools.repeat("__code__"), codes), maxlen=0)


def _on_entry(code: types.CodeType, original: types.FunctionType, args: list[Any], values: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A stub was called: run the instrumented code instead, or the original one. `values` are those of the keyword-only parameters.

    The functions with this code get the instrumented code for their next call. A function that `_module_reads` replaces keeps its stub,
    and so does an observer.
    """
    if _OBSERVERS.is_searched_for(code, args):
        return None
    kwargs = {**dict(zip(code.co_varnames[code.co_argcount :], values, strict=False)), **kwargs}
    if _hooks.runs_original(code):
        return original(*args, **kwargs)
    if _hooks.run_apart(_OBSERVERS.is_observer, code, args):
        return _hooks.run_apart(original, *args, **kwargs)
    recording = _hooks.now()
    if recording is not None and code in REPLACEMENTS:
        return REPLACEMENTS[code](recording, _original(code), *args, **kwargs)
    _hooks.run_apart(_enter, original, code)
    return original(*args, **kwargs)


def _enter(fn: types.FunctionType, code: types.CodeType) -> None:
    """Give `fn` the instrumented form of `code`, and the functions with this code too, unless it is an observer's."""
    fn.__code__ = _INSTRUMENTER.instrumented(code) if id(code) in _OBSERVERS.codes else _entered(code)


def _entered(code: types.CodeType) -> types.CodeType:
    """The instrumented form of `code`, which the functions with this code get."""
    made, is_first = _INSTRUMENTER.enter(code)
    if not is_first:
        for swapped in _swapped:
            for fn in swapped.with_code(code):
                if code_of(fn) is code:
                    fn.__code__ = made
    return made


def before_call(called: Any) -> Any:
    """Give a function its instrumented code before it is called, so that its stub leaves no frames between the caller's and its own."""
    fn = called.__func__ if type(called) is types.MethodType else called
    if type(fn) is types.FunctionType and id(fn.__code__) in _INSTRUMENTER.stubs:
        code = code_of(fn)
        if code not in REPLACEMENTS and id(code) not in _OBSERVERS.codes:
            fn.__code__ = _entered(code)
    return called


@functools.cache
def _original(code: types.CodeType) -> types.FunctionType:
    """The instrumented function that `_module_reads` replaces."""
    return types.FunctionType(_INSTRUMENTER.instrumented(code), sys.modules[torch.nn.Module.__module__].__dict__, code.co_name)


_INSTRUMENTER = Instrumenter(_hooks.HOOKS, _on_entry)
_OBSERVERS = Observers()
