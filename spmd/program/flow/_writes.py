"""What a branch or a loop body writes to Python objects that were there before it: nothing may be left of it.

A body is traced twice or more, a branch also where it is not taken, and the program runs it as often as values say: what Python
would be changed to is known to the device alone. An object that the body itself makes is another one in each trace; what two traces
of it write to in the same place was there before.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

from spmd.base._errors import TraceError, called_at, message
from spmd.program.reads import Writes, is_same_content, python_writes, shown


class OuterWrites:
    """The writes of one body, trace after trace."""

    def __init__(self) -> None:
        self._first: Writes | None = None

    @contextmanager
    def traced(self) -> Generator[None]:
        """Around each trace of the body.

        Raises:
            TraceError: it leaves something else than it found.
        """
        with python_writes() as writes:
            yield
        if self._first is None:
            self._first = writes
            return
        for place in writes.keys() & self._first.keys():
            title, before, read = self._first[place]
            now = read()
            if now is not before and not is_same_content(now, before):
                raise TraceError(
                    message(
                        f"a branch or loop body in a compiled function changes {title}",
                        *called_at(),
                        f"it was {shown(before)}, the body leaves {shown(now)}",
                        "whether and how often it runs is known to the device alone",
                        fix="return a tensor instead, or update one on the device in place",
                    )
                )


__all__ = ["OuterWrites"]
