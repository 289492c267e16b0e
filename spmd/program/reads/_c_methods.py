"""Records calls of the methods of objects in C: what they read and write. Refuses those whose effect no other call can see."""

from __future__ import annotations

import decimal
import functools
import random
import types
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from spmd.base._errors import TraceAgain
from spmd.program.reads._container_methods import CONTAINERS, note_method
from spmd.program.reads._hidden_state import LOCKS, POINTER, has_hidden_state, is_output, lock_question
from spmd.program.reads._library import is_recorded
from spmd.program.reads._places import CDATA
from spmd.program.reads._random_generators import GLOBAL_RANDOM, question_of_generator, state_of
from spmd.program.reads._trace_errors import refused

if TYPE_CHECKING:
    from spmd.program.reads._recorder import Recording

_GENERATORS = (random.Random, np.random.Generator, np.random.RandomState, np.random.BitGenerator)


# classes with attributes that `note_c_attribute` knows
BY_NAME = (POINTER, np.recarray, np.record, np.random.BitGenerator, decimal.Context)


def note_c_attribute(recording: Recording, owner: Any, name: str) -> None:
    """Record the read of an attribute that is new in every read, of an object in `BY_NAME`."""
    if isinstance(owner, (POINTER, np.recarray)):
        recording.read_content(owner)
    elif isinstance(owner, np.record):
        recording.read_content(owner.base)
    elif isinstance(owner, np.random.BitGenerator) and name == "state":
        recording.ask_all([((id(owner), name), f"{type(owner).__name__}.state", functools.partial(state_of, owner))])
    elif isinstance(owner, decimal.Context) and name == "traps":
        recording.owned(owner, owner.traps)
    elif isinstance(owner, decimal.Context) and name == "flags":
        recording.flags.require_cleared(owner)


class ContextNeeded(TraceAgain):
    """A context variable without a value is set, which only a token could undo: trace again in a copy of the context."""

    def other_settings(self, settings: Any) -> Any:
        return replace(settings, has_own_context=True)


def note_c_method(recording: Recording, owner: Any, name: str, args: tuple[Any, ...]) -> None:
    """Record a call of a method of `owner` that is C code."""
    kind = type(owner)  # `isinstance` would read the object's `__class__`, which may be user code
    if name in ("__setattr__", "__delattr__") and args and isinstance(args[0], str):
        recording.store_attr(owner, args[0]) if issubclass(kind, type) else recording.store_as_is(owner, args[0])
        return
    if issubclass(kind, CONTAINERS) and not issubclass(kind, np.ndarray):
        note_method(recording, owner, name, args)
        return
    if (question := question_of_generator(name, owner)) is not None:
        recording.ask_all([question])
    elif kind is ContextVar:
        if name != "get" and owner.get(recording) is recording and not recording.has_own_context:
            raise ContextNeeded
        recording.read_content(owner) if name == "get" else recording.journal.content(owner, owner.name)
        if name == "reset":
            recording.use_up(args[0], "used by reset()")
    elif issubclass(kind, _GENERATORS) and owner is not GLOBAL_RANDOM:
        if name not in ("getstate", "get_state"):
            raise refused(f"{type(owner).__name__}.{name}(): random numbers of the host")
    elif issubclass(kind, (np.flatiter, memoryview, CDATA)) and name == "__setitem__":
        recording.mutate(owner)
    elif issubclass(kind, memoryview) and name in ("release", "__exit__"):
        recording.use_up(owner, "released")
    elif kind is decimal.Context:
        recording.flags.clear(owner) if name == "clear_flags" else recording.flags.use(owner)
    elif kind is functools._lru_cache_wrapper and name in ("cache_info", "cache_clear"):
        raise refused(f"{owner.__qualname__}.{name}(): the earlier calls of a cached function")
    elif has_hidden_state(kind):
        recording.use_up(owner, f"used by {name}(), which no other call sees")
    elif kind in LOCKS:
        recording.ask(owner, lock_question(owner, recording._title(owner)))
        recording.journal.setting(owner, "locked", "a lock", *LOCKS[kind](owner))
    elif name in ("__getattribute__", "__getattr__") and args and isinstance(args[0], str):
        recording.load_attr(owner, args[0])
    elif issubclass(kind, Iterator):
        if not is_output(owner, name):
            recording.advance(owner, f"advanced by {name}()")
    elif issubclass(kind, np.ndarray):
        recording.read_content(owner)
        if name == "resize":
            recording.use_up(owner, "resized")
        elif name in _WRITES_OF_ARRAYS or name in INPLACE:
            recording.mutate(owner)
    elif kind is types.MappingProxyType:
        recording.read_content(owner)
    elif name == "add_note" and issubclass(kind, BaseException):
        recording.load_attr(owner, "__notes__")
        recording.store_attr(owner, "__notes__")
        recording.mutate(getattr(owner, "__notes__", None))
    elif not issubclass(kind, torch.Tensor):
        if not is_recorded(kind.__module__):
            recording.read_deep(owner)
        elif name not in ("__init__", "__new__"):
            recording.ask_identity(owner)  # `__hash__`, `__eq__`
    else:
        recording.read_content(owner)
    for arg in args:
        recording.read_deep(arg)


_WRITES_OF_ARRAYS = frozenset(("fill", "sort", "partition", "put", "itemset", "setfield", "byteswap", "setflags", "__setitem__"))
INPLACE = frozenset(
    f"__i{name}__" for name in ["add", "sub", "mul", "matmul", "truediv", "floordiv", "mod", "pow", "lshift", "rshift", "and", "xor", "or"]
)


__all__ = ["BY_NAME", "INPLACE", "ContextNeeded", "note_c_attribute", "note_c_method"]
