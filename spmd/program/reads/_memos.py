"""What functools keeps behind a function: results of cached functions, registered implementations of generic ones."""

from __future__ import annotations

import functools
import gc
import types
from typing import TYPE_CHECKING, Any

import torch

from spmd.base._torch import pytree
from spmd.program.reads._varying import Varying

if TYPE_CHECKING:
    from spmd.program.reads._recorder import Recording


def read_registry(recording: Recording, fn: Any) -> None:
    """If `fn` chooses among implementations (`functools.singledispatch`): these are those of the trace."""
    registry = fn.__dict__.get("registry")
    if isinstance(registry, types.MappingProxyType):
        recording._title_of(registry, f"the implementations of {fn.__qualname__}")
        recording.look_into(registry)


class Cache:
    """The results that a cached function holds while a trace runs."""

    def __init__(self, fn: functools._lru_cache_wrapper[Any]) -> None:
        self.fn = fn
        self.results: dict[Any, Any] = next(o for o in gc.get_referents(fn) if type(o) is dict and o is not fn.__dict__)
        self._before = frozenset(self.results)
        self._no_key = next(o for o in gc.get_referents(fn) if type(o) is object)

    def call(self, recording: Recording, *args: Any, **kwargs: Any) -> Any:
        """The function's result. One that was there before the trace is expected in every call."""
        misses = self.fn.cache_info().misses
        result = self.fn(*args, **kwargs)
        key = self._key(args, kwargs)
        if self.fn.cache_info().misses == misses and key in self._before:
            recording._title_of(self.results, f"the cache of {self.fn.__qualname__}")
            recording._read_item(recording.parts(self.fn, self.results), key)
        elif _holds(result, Varying):
            self.results.pop(key, None)
            raise TypeError(f"{self.fn.__qualname__} keeps what it computes: it takes no Varying")  # the trace starts again without these
        return result

    def forget(self) -> None:
        """Drop results of the trace that hold tensors, or numbers of the device: these belong to the trace."""
        for key in [k for k in self.results if k not in self._before]:
            held = self.results[key]
            values = gc.get_referents(held) if type(held).__name__ == "_lru_list_elem" else [held]
            if any(_holds(value, (torch.Tensor, torch.SymFloat, torch.SymInt)) for value in values):
                del self.results[key]

    def _key(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """As functools makes it."""
        is_typed = self.fn.cache_parameters()["typed"]
        if not kwargs and not is_typed:
            return args[0] if len(args) == 1 and type(args[0]) in (int, str) else args
        named = [part for item in kwargs.items() for part in item]
        types_of = [*map(type, args), *map(type, kwargs.values())] if is_typed else []
        return (*args, *([self._no_key, *named] if kwargs else []), *types_of)


def _holds(value: Any, kinds: Any) -> bool:
    return any(isinstance(leaf, kinds) for leaf in pytree.tree_leaves(value))
