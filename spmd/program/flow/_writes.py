"""What a branch or a loop body writes to Python objects that were there before it: nothing may be left of it.

A body is traced twice or more, a branch also where it is not taken, and the program runs it as often as values say: what Python
would be changed to is known to the device alone. An object that the body itself makes is another one in each trace; what two traces
of it write to in the same place was there before.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, NamedTuple

from spmd.base._errors import TraceError, called_at, message
from spmd.program.reads import Writes, is_same_content, python_writes, shown


class OuterWrites:
    """The writes of one body, trace after trace."""

    def __init__(self) -> None:
        self._places: set[Any] | None = None  # that its first trace wrote to
        self._changed: dict[Any, Change] = {}  # of these, what that trace left changed

    @contextmanager
    def traced(self) -> Generator[None]:
        """Around each trace of the body.

        Raises:
            TraceError: it leaves something else than it found.
        """
        with python_writes() as writes:
            yield
        changed = _changes(writes)
        if self._places is None:
            self._places, self._changed = set(writes), changed
            return
        for place in filter(self._places.__contains__, writes):
            change = self._changed.get(place) or changed.get(place)
            if change is not None:
                raise TraceError(
                    message(
                        f"a branch or loop body in a compiled function changes {change.title}",
                        *called_at(),
                        f"it was {shown(change.before)} before, and is {shown(change.after)} after it",
                        "whether and how often it runs is known to the device alone",
                        fix="return a tensor instead, or update one on the device in place",
                    )
                )


class Change(NamedTuple):
    """What a place held before a trace of a body, and after it."""

    title: str
    before: Any
    after: Any


def _changes(writes: Writes) -> dict[Any, Change]:
    found = {place: Change(title, before, read()) for place, (title, before, read) in writes.items()}
    return {place: c for place, c in found.items() if c.after is not c.before and not is_same_content(c.after, c.before)}


__all__ = ["OuterWrites"]
