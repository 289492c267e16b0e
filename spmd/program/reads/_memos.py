"""State of functools' wrappers: results of cached functions (`lru_cache`), implementations of generic functions (`singledispatch`)."""

from __future__ import annotations

import abc
import datetime
import enum
import functools
import gc
import numbers
import pathlib
import re
import sys
import types
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from spmd.base._errors import TraceError, message
from spmd.base._torch import pytree
from spmd.program.find._static import attributes_of, slots_of
from spmd.program.reads._classes import ask_abstract
from spmd.program.reads._nested import inside
from spmd.program.reads._parts import WITH_ITEMS, is_data
from spmd.program.reads._places import PLAIN
from spmd.program.reads._varying import NumbersNeeded, Varying

if TYPE_CHECKING:
    from spmd.program.reads._recorder import Recording


GENERIC = functools.wraps.__code__.co_filename  # the file with the code of generic functions
_IMMUTABLE = (
    *(*PLAIN, enum.Enum, re.Pattern, numbers.Number, datetime.date, datetime.time, datetime.timedelta, pathlib.PurePath),
    *(type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType),
)
_OF_TRACE = (torch.Tensor, torch.SymFloat, torch.SymInt)


def read_registry(recording: Recording, fn: Any, args: tuple[Any, ...] = ()) -> None:
    """Record the implementations of a generic function (`functools.singledispatch`), and which a call of it selects."""
    registry = fn.__dict__.get("registry")
    if isinstance(registry, types.MappingProxyType):
        recording._title_of(registry, f"the implementations of {fn.__qualname__}")
        recording.read_content(registry)
        for cls in registry if args else ():
            if isinstance(cls, abc.ABCMeta):
                ask_abstract(recording, type(args[0]), cls)


def num_keys(fn: Any) -> int:
    """Number of leading arguments that `fn` uses as a key: all of a cached function, one of a generic function, else 0."""
    if isinstance(fn, functools._lru_cache_wrapper):
        return sys.maxsize
    return int(type(fn) is types.FunctionType and fn.__code__.co_filename == GENERIC)


class Cache:
    """The cache of a function of `functools.lru_cache` during a trace.

    Attributes:
        fn: the cached function.
        results: the dict of its results, by key.
        lookups: calls whose result stays in the cache. Every call looks it up too: which result is evicted depends on that.
        found: results that count as older than the trace: those that it has found, and those that it leaves in the cache.
        is_running: whether a call of the function has not returned yet.
        made: tensors in results that the trace computed, each with its version at that time.
    """

    def __init__(self, fn: functools._lru_cache_wrapper[Any]) -> None:
        self.fn = fn
        referents = gc.get_referents(fn)[::-1]  # keys and results come before its own parts
        self.results: dict[Any, Any] = next(o for o in referents if type(o) is dict and o is not fn.__dict__)
        self._kept = set(self.results)  # keys that later calls find too
        self.made: list[tuple[torch.Tensor, int]] = []
        self.found: list[Any] = []
        self._missed: list[Any] = []
        self._of_trace: list[Any] = []
        self.lookups: list[Callable[[], Any]] = []
        self.is_running = False
        self._is_first = True
        self._no_key = next(o for o in referents if type(o) is object)

    def call(self, recording: Recording, *args: Any, **kwargs: Any) -> Any:
        """Call the function.

        A result that was cached before the trace is guarded: every call has to find it. A result that the trace computes is guarded as
        missing in three cases: it holds tensors, which do not stay in the cache after the trace; the function wrote something, which
        a cached result would not write again; or code can write to it, as to a list or an object, which the cache keeps from then on.
        """
        misses, journal = self.fn.cache_info().misses, recording.journal
        num_writes, num_outputs = journal.num_writes, len(journal.outputs)
        is_inner = any(cache.is_running for cache in recording.caches.values())  # later calls find the outer result
        was_running, self.is_running = self.is_running, True
        try:
            result = self.fn(*args, **kwargs)
        finally:
            self.is_running = was_running
        key, title = self._key(args, kwargs), f"the cache of {self.fn.__qualname__}"
        if self.fn.cache_info().misses == misses:
            if key in self._kept:
                self.found.append(result)
                recording._title_of(self.results, title)
                recording._read_item(recording.owned(self.fn, self.results), key)
                self._repeat(args, kwargs, is_inner)
            return result
        self._missed.append(key)
        if _holds(result, Varying):
            raise NumbersNeeded
        if (is_of_trace := _holds(result, _OF_TRACE)) or journal.num_writes > num_writes or not _is_immutable(result):
            recording.read_missing(self.fn, self.results, key, f"{title}[{{!r}}]")
            if not is_of_trace:  # a call whose key was evicted is traced again: it leaves the key in the cache
                self.found += _all_inside(result)  # what is written to it from now on is written after each call
                recording.ask(self.fn, ((id(self.fn), "misses"), f"the misses of {title}", lambda: self.fn.cache_info().misses))
            if is_of_trace:  # keep the key: the dict of a bounded cache holds links, which do not show their results
                self._of_trace.append(key)
            self._note_tensors(result)
        else:
            self._kept.add(key)
            for output in journal.outputs[num_outputs:]:
                output.forget = functools.partial(self.results.pop, key, None)
            self._repeat(args, kwargs, is_inner)
        return result

    def _repeat(self, args: tuple[Any, ...], kwargs: dict[str, Any], is_inner: bool) -> None:
        if not is_inner and all(isinstance(value, PLAIN) for value in (*args, *kwargs.values())):
            self.lookups.append(functools.partial(self.fn, *args, **kwargs))

    def _note_tensors(self, result: Any) -> None:
        tensors = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor) and not leaf.is_inference()]
        self.made.extend((tensor, tensor._version) for tensor in tensors)

    def look_up(self) -> Callable[[], None]:
        """Look up what the trace has looked up, which has done that for the first call. Returns what to do when the call ends."""
        for look_up in self.lookups if not self._is_first else ():
            look_up()
        self._is_first = False
        return lambda: None

    def forget(self) -> None:
        """Drop the results that hold tensors or program numbers: these are valid only in the trace."""
        for key in self._of_trace:
            self.results.pop(key, None)

    def forget_all(self) -> None:
        """Drop all results that the trace has computed, because it failed."""
        for key in self._missed:
            self.results.pop(key, None)

    def _key(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The key under which functools caches a result."""
        is_typed = self.fn.cache_parameters()["typed"]
        if not kwargs and not is_typed:
            return args[0] if len(args) == 1 and type(args[0]) in (int, str) else args
        named = [part for item in kwargs.items() for part in item]
        types_of = [*map(type, args), *map(type, kwargs.values())] if is_typed else []
        return (*args, *([self._no_key, *named] if kwargs else []), *types_of)


@contextmanager
def forgetting(caches: Mapping[int, Cache]) -> Generator[None]:
    """A context for a trace, at whose end the caches drop the results that are valid only in it: all of them if the trace failed."""
    try:
        yield
    except BaseException:
        for cache in caches.values():
            cache.forget_all()
        raise
    finally:
        for cache in caches.values():
            cache.forget()


def require_unwritten(caches: Iterable[Cache]) -> None:
    """Refuse in-place writes to tensors in a cache: eager code would find the changed tensor, but a program computes it again.

    Raises:
        TraceError: a cached tensor was written to.
    """
    for cache in caches:
        made, cache.made = cache.made, []
        if any(tensor._version != version for tensor, version in made):
            name = cache.fn.__qualname__
            raise TraceError(
                message(
                    f"the compiled function writes in place to a tensor that {name} has cached",
                    "eager code would find the changed tensor in the cache, but a program computes it again",
                    fix=f"write to a copy: {name}(...).clone()",
                )
            )


def _holds(value: Any, kinds: Any) -> bool:
    return any(isinstance(part, kinds) for part in inside(value, _parts_of))


def _parts_of(value: Any) -> list[Any] | None:
    """The parts of a container or a plain object; None for other values."""
    if isinstance(value, PLAIN) or not (isinstance(value, WITH_ITEMS) or is_data(value)):
        return None
    items = dict.items(value) if isinstance(value, dict) else value if isinstance(value, WITH_ITEMS) else ()
    return [*items, *(attributes_of(value) or {}).values(), *slots_of(value).values()]


def _all_inside(value: Any) -> list[Any]:
    """A value, and all that is inside it."""
    found: dict[int, Any] = {}
    waiting = [value]
    while waiting:
        part = waiting.pop()
        if id(part) not in found and not isinstance(part, PLAIN):
            found[id(part)] = part
            waiting += _parts_of(part) or ()
    return list(found.values())


def _is_immutable(value: Any) -> bool:
    """Whether no code can write to a value: numbers, strings, functions, and tuples of them."""
    return all(isinstance(part, _IMMUTABLE) for part in inside(value, lambda part: part if type(part) in (tuple, frozenset) else None))
