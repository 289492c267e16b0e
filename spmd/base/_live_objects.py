"""Lists objects of this process through Python's garbage collector, while other threads run.

Note [Objects under construction]
    `gc.get_objects` also returns tuples that the C code of another thread is still filling. CPython does not resize a tuple that anything
    else refers to: that thread gets a SystemError, or a segmentation fault if it does not check. So one call of C lists all objects and
    lets go of those nobody wants, and no other thread runs before it returns. Up to Python 3.11 an allocation may start a collection,
    and that runs Python (finalisers, callbacks) inside the call; so collections wait.
"""

from __future__ import annotations

import gc
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import chain, compress, repeat
from typing import Any, TypeVar

T = TypeVar("T")


def live_instances(cls: type[T]) -> list[T]:
    """The objects of a class and of its subclasses that the garbage collector tracks, without those that are frozen."""
    with _no_collection():
        return list(_instances(cls))


def live_ids() -> frozenset[int]:
    """The ids of all objects that the garbage collector tracks, without those that are frozen."""
    with _no_collection():
        return frozenset(map(id, _objects()))


def _objects() -> Iterator[Any]:
    return chain.from_iterable(map(gc.get_objects, (None,)))  # nothing is listed before the first item is asked for


def _instances(cls: type) -> Iterator[Any]:
    twice = chain.from_iterable(map(repeat, _objects(), repeat(2)))  # each object follows itself; `tee` would keep the objects listed last
    return compress(twice, map(partial(type.__subclasscheck__, cls), map(type, twice)))


@contextmanager
def _no_collection() -> Generator[None]:
    is_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if is_enabled:
            gc.enable()


__all__ = ["live_ids", "live_instances"]
