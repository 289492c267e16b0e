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
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from spmd.base._errors import TraceError, message
from spmd.base._torch import pytree
from spmd.device._random_stream import default_stream
from spmd.program.find._static import attributes_of, slots_of
from spmd.program.reads._classes import ask_abstract
from spmd.program.reads._instrument import Instrumenter
from spmd.program.reads._journal import Effect
from spmd.program.reads._nested import inside
from spmd.program.reads._number_place import ABSENT
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
_MOST_TRIES = 1000  # for a cache that never takes the result
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


class Computed:
    """A result that a trace has computed for a cached function: its tensors are those of the trace.

    Attributes:
        name: the name of the function.
        key: its key in the cache.
        result: the result.
        versions: the tensors in it, each with its version when it was computed.
        is_drawn: whether random numbers were drawn for it.
    """

    def __init__(
        self, fn: Any, key: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, is_in_part: bool, is_drawn: bool
    ) -> None:
        """`is_in_part`: a body of the program has computed it, which only the body sees."""
        self.name, self.is_drawn = fn.__qualname__, is_drawn
        self.key, self.result, self._put, self._is_in_part = key, result, PutInCache(fn, args, kwargs), is_in_part
        tensors = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor) and not leaf.is_inference()]
        self.versions = [(tensor, tensor._version) for tensor in tensors]

    def is_left(self, recording: Recording) -> bool:
        """Whether every call leaves its own result in the cache: later calls have the same key."""
        is_function = type(getattr(self._put.fn, "__wrapped__", None)) is types.FunctionType
        is_made = any(not (isinstance(part, _IMMUTABLE) or recording.is_before(part)) for part in self._key_parts())
        return is_function and not is_made and not self.is_left_by_eager_code(recording)

    def is_left_by_eager_code(self, recording: Recording) -> bool:
        """Whether a later call of eager code may find it, though no call of the program leaves it."""
        return self._is_in_part or not recording.leaves_cached or self._is_of_caller(recording)

    def _key_parts(self) -> list[Any]:
        return [part for part in inside(self._put.given, _items_of) if type(part) is not tuple]

    def _is_of_caller(self, recording: Recording) -> bool:
        """Whether the key has an argument of the compiled function in it, of which the trace has a copy."""
        given = {id(value) for value in recording._arguments if isinstance(value, torch.Tensor)} | set(recording.given)
        return any(id(part) in given for part in self._key_parts())

    def effect(self) -> Effect:
        """The write with which every call leaves its result."""
        return Effect(self._put, ABSENT, f"the cache of {self.name}", ABSENT, self.result, self._put)


class PutInCache:
    """Puts a result into the cache of a function. Only C code can do that, when the function returns: so it returns the result meanwhile.

    A full cache does not take a result if its oldest key is gone, as after `Cache.forget`. So the function is called until it has it.
    """

    def __init__(self, fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.fn = fn
        self.given = args, tuple(kwargs.items())

    def __call__(self, result: Any) -> None:
        wrapped, (args, named) = self.fn.__wrapped__, self.given
        code = wrapped.__code__
        wrapped.__code__ = Instrumenter({}, lambda *_: result).stub(code)
        try:
            for _ in range(_MOST_TRIES if self.fn.cache_parameters()["maxsize"] != 0 else 0):
                num_misses = self.fn.cache_info().misses
                self.fn(*args, **dict(named))
                if self.fn.cache_info().misses == num_misses:
                    return
        finally:
            wrapped.__code__ = code


class Cache:
    """The cache of a function of `functools.lru_cache` during a trace.

    Attributes:
        fn: the cached function.
        results: the dict of its results, by key.
        lookups: calls whose result stays in the cache. Every call looks it up too: which result is evicted depends on that.
        found: results that count as older than the trace: those that it has found, and those that it leaves in the cache.
        is_running: whether a call of the function has not returned yet.
        computed: results with tensors that the trace computed.
    """

    def __init__(self, fn: functools._lru_cache_wrapper[Any]) -> None:
        self.fn = fn
        referents = gc.get_referents(fn)[::-1]  # keys and results come before its own parts
        self.results: dict[Any, Any] = next(o for o in referents if type(o) is dict and o is not fn.__dict__)
        self._kept = set(self.results)  # keys that later calls find too
        self.computed: list[Computed] = []
        self.found: list[Any] = []
        self._missed: list[Any] = []
        self.lookups: list[Callable[[], Any]] = []
        self.is_running = False
        self._is_first = True
        self._no_key = next(o for o in referents if type(o) is object)

    def call(self, recording: Recording, *args: Any, **kwargs: Any) -> Any:
        """Call the function.

        A result that was cached before the trace is guarded: every call has to find it. A result that the trace computes is guarded as
        missing in three cases: it holds tensors, which each call of the program puts there (`effects`); the function wrote something, which
        a cached result would not write again; or code can write to it, as to a list or an object, which the cache keeps from then on.
        """
        misses, journal = self.fn.cache_info().misses, recording.journal
        num_writes, num_outputs, num_draws = journal.num_writes, len(journal.outputs), default_stream.draws
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
            if is_of_trace:  # note the key: the dict of a bounded cache holds links, which do not show their results
                self.computed.append(Computed(self.fn, key, args, kwargs, result, journal.is_in_part, default_stream.draws != num_draws))
        else:
            self._kept.add(key)
            for output in journal.outputs[num_outputs:]:
                output.forget = functools.partial(self.results.pop, key, None)
            self._repeat(args, kwargs, is_inner)
        return result

    def _repeat(self, args: tuple[Any, ...], kwargs: dict[str, Any], is_inner: bool) -> None:
        if not is_inner and all(isinstance(value, PLAIN) for value in (*args, *kwargs.values())):
            self.lookups.append(functools.partial(self.fn, *args, **kwargs))

    def look_up(self) -> Callable[[], None]:
        """Look up what the trace has looked up, which has done that for the first call. Returns what to do when the call ends."""
        for look_up in self.lookups if not self._is_first else ():
            look_up()
        self._is_first = False
        return lambda: None

    def forget(self) -> None:
        """Drop the results that hold tensors or program numbers: these are valid only in the trace."""
        for computed in self.computed:
            self.results.pop(computed.key, None)

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


def left_in_caches(recording: Recording) -> list[Effect]:
    """The writes with which every call leaves the results that it computes in the caches, as eager code does."""
    computed = (each for cache in recording.caches.values() for each in cache.computed)
    return [each.effect() for each in computed if each.is_left(recording)]


def require_unwritten(recording: Recording) -> None:
    """Check the results that a call cannot leave in a cache, so that every call computes them again.

    Raises:
        TraceError: a cached tensor was written to, or random numbers were drawn for it: eager code would find the first one.
    """
    for computed in (each for cache in recording.caches.values() for each in cache.computed if not each.is_left(recording)):
        name = computed.name
        if any(tensor._version != version for tensor, version in computed.versions):
            raise TraceError(
                message(
                    f"the compiled function writes in place to a tensor that {name} has cached",
                    "eager code would find the changed tensor in the cache, but a program computes it again",
                    fix=f"write to a copy: {name}(...).clone()",
                )
            )
        if computed.is_drawn and computed.is_left_by_eager_code(recording):
            raise TraceError(
                message(
                    f"{name} caches random numbers in a loop, in one of several steps, with dynamic=, or for an argument of the call",
                    "eager code would find the first ones in the cache, but a program draws them again",
                    fix=f"call {name}(...) before the step, or outside of the body",
                )
            )


def _holds(value: Any, kinds: Any) -> bool:
    return any(isinstance(part, kinds) for part in inside(value, _parts_of))


def _items_of(value: Any) -> Any:
    return value if type(value) in (tuple, frozenset) else None


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
    return all(isinstance(part, _IMMUTABLE) for part in inside(value, _items_of))
