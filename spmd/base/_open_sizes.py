"""Whether the present trace stands for other sizes too. If so, no operation may choose its form by a size.

For an even number of rows, `x[::2]` can be one of two columns of a reshape; for any number it is a slice with a step. A partitioner
handles the first better, but only the second is the same program for all sizes.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar

_are_open: ContextVar[bool] = ContextVar("spmd_open_sizes", default=False)


def are_sizes_open() -> bool:
    """Whether a trace is running that will be compared with traces at other sizes."""
    return _are_open.get()


@contextmanager
def open_sizes() -> Generator[None]:
    """A context for such a trace."""
    yield from _set(True)


@contextmanager
def closed_sizes() -> Generator[None]:
    """A context for an operation whose use of sizes has the same form for all sizes."""
    yield from _set(False)


def _set(value: bool) -> Generator[None]:
    token = _are_open.set(value)
    try:
        yield
    finally:
        _are_open.reset(token)


__all__ = ["are_sizes_open", "closed_sizes", "open_sizes"]
