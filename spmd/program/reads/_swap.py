"""Every function outside the libraries has instrumented code, or a stub that asks for it, while a recording runs, and its own afterwards.

A process that has imported transformers and peft has ten thousand such functions, and each trace swaps them all. So nothing here
is a step of Python for each function but what `map` does in C, and what was given to a function is looked up only for what was not
there at the last trace. Where several recordings follow each other, functions stay swapped in between (`reads.recorded_together`).
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
from spmd.program.reads._module_reads import STAND_INS

_codes_of = operator.attrgetter("__code__")


class Swapped:
    """Functions that were swapped.

    Attributes:
        functions: they.
        codes: what each had before.
        given: what each was given: a stub, or instrumented code if it was entered in a recording before.
    """

    def __init__(self, functions: list[types.FunctionType]) -> None:
        self.functions = functions
        self.codes: list[types.CodeType] = list(map(_codes_of, functions))
        codes, given = _last[0]
        num = _num_common(self.codes, codes)
        self.given = [*given[:num], *_INSTRUMENTER.given(self.codes[num:])]

    @functools.cached_property
    def _by_code(self) -> tuple[dict[int, types.FunctionType], dict[int, list[types.FunctionType]]]:
        """By id of a code one function that has it, and all others."""
        keys = list(map(id, self.codes))
        one = dict(zip(keys, self.functions, strict=True))
        others: defaultdict[int, list[types.FunctionType]] = defaultdict(list)
        if len(one) < len(keys):
            is_other = map(operator.is_not, map(one.__getitem__, keys), self.functions)
            for index in itertools.compress(range(len(keys)), is_other):
                others[keys[index]].append(self.functions[index])
        return one, others

    def with_code(self, code: types.CodeType) -> list[types.FunctionType]:
        """The functions that had `code`."""
        one, others = self._by_code
        return [one[id(code)], *others.get(id(code), ())] if id(code) in one else []


_swapped: list[Swapped] = []  # of the recordings that run, the innermost last
_last: list[tuple[list[types.CodeType], list[types.CodeType]]] = [([], [])]  # codes, and what they were given, in the last recording


def code_of(fn: types.FunctionType) -> types.CodeType:
    """The function's own code, also while it is swapped."""
    return _INSTRUMENTER.original.get(id(fn.__code__), fn.__code__)


def swap(functions: list[types.FunctionType]) -> Swapped:
    """Give every function that is not swapped already a stub, or its instrumented code; returns what `restore` needs."""
    if _swapped:
        is_ours = map(_INSTRUMENTER.original.__contains__, map(id, map(_codes_of, functions)))
        functions = list(itertools.compress(functions, map(operator.not_, is_ours)))
    swapped = Swapped(functions)
    _set_codes(functions, swapped.given)
    _swapped.append(swapped)
    return swapped


def restore(swapped: Swapped) -> None:
    """Undo `swap`, but for functions that the user's program gave another code meanwhile."""
    _swapped.remove(swapped)
    functions, codes, given = swapped.functions, swapped.codes, swapped.given
    now: list[types.CodeType] = list(map(_codes_of, functions))
    is_ours = list(map(operator.is_, now, given))
    if not all(is_ours):
        for index in itertools.compress(range(len(now)), map(operator.not_, is_ours)):
            own = code_of(functions[index])
            is_ours[index] = own is codes[index]
            if is_ours[index]:
                given[index] = now[index]  # it was entered
            else:
                functions[index].__code__ = own  # of another function, maybe swapped too
        functions, codes = list(itertools.compress(functions, is_ours)), list(itertools.compress(codes, is_ours))
    if not _swapped:
        _last[0] = swapped.codes, given
    _set_codes(functions, codes)


@contextmanager
def recorded_together() -> Generator[None]:
    """In the block functions stay swapped from one recording to the next: a swap of ten thousand takes as long as a small trace."""
    swapped = swap(HEAP.functions())
    try:
        yield
    finally:
        restore(swapped)


def _num_common(codes: list[types.CodeType], others: list[types.CodeType]) -> int:
    """How many codes both begin with."""
    is_same = list(map(operator.is_, codes, others))
    return len(is_same) if all(is_same) else is_same.index(False)


def _set_codes(functions: list[types.FunctionType], codes: list[types.CodeType]) -> None:
    deque(map(setattr, functions, itertools.repeat("__code__"), codes), maxlen=0)


def _entered(code: types.CodeType, closure: tuple[Any, ...], args: list[Any], kwargs: dict[str, Any]) -> Any:
    """A stub was called: run the instrumented code, which its functions have in later recordings, and in this one if they are called again.

    The stub of a function with a stand-in stays.
    """
    if code in STAND_INS:
        own, recording = _own(code), _hooks.now()
        return own(*args, **kwargs) if recording is None else STAND_INS[code](recording, own, *args, **kwargs)
    made, is_first = _INSTRUMENTER.enter(code)
    if not is_first:
        for swapped in _swapped:
            for fn in swapped.with_code(code):
                if code_of(fn) is code:
                    fn.__code__ = made
    fn = types.FunctionType(made, sys._getframe(1).f_globals, code.co_name, None, closure or None)
    return fn(*args, **kwargs)


@functools.cache
def _own(code: types.CodeType) -> types.FunctionType:
    """The instrumented function for which there is a stand-in."""
    return types.FunctionType(_INSTRUMENTER.instrumented(code), sys.modules[torch.nn.Module.__module__].__dict__, code.co_name)


_INSTRUMENTER = Instrumenter(_hooks.HOOKS, _entered)
