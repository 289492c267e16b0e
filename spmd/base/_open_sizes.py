"""Whether what is traced stands for other sizes too: then no operation may choose its form by a size.

A part `x[::2]` of an even number of rows is one of two columns, of any number a slice with a step. The first is better known to a
partitioner, the second is one program for both.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar

_are_open: ContextVar[bool] = ContextVar("spmd_open_sizes", default=False)


def are_sizes_open() -> bool:
    """True while a trace runs that others of other sizes are compared with."""
    return _are_open.get()


@contextmanager
def open_sizes() -> Generator[None]:
    """While such a trace runs."""
    yield from _set(True)


@contextmanager
def closed_sizes() -> Generator[None]:
    """While an operation makes of the sizes what has the same form for all."""
    yield from _set(False)


def _set(value: bool) -> Generator[None]:
    token = _are_open.set(value)
    try:
        yield
    finally:
        _are_open.reset(token)


__all__ = ["are_sizes_open", "closed_sizes", "open_sizes"]
