"""What a branch, a loop body or a micro-batch leaves changed in Python objects that were there before it: refused where a run would differ.

A body is traced twice or more, a branch also where it is not taken, and the program runs it as often as values say: what Python
would be changed to is known to the device alone. Micro-batches all run, and those after the first are one trace: they may leave
what they leave alike. An object that the body itself makes is another one in each trace; what two traces of it write to in the same
place was there before.
"""

from __future__ import annotations

import collections
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

from spmd.base._errors import TraceError, called_at, message
from spmd.program.reads import Varying, is_same_content, made_in_trace, python_writes, shown


class BodyWrites:
    """The writes of one body, trace after trace."""

    def __init__(self, *, is_micro_batch: bool = False) -> None:
        """`is_micro_batch`: every run happens, and finds what the run before it left."""
        self._is_micro_batch = is_micro_batch
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
        found = {place: Change(title, before, read()) for place, (title, before, read) in writes.items()}
        changed = {place: change for place, change in found.items() if change.after is not change.before}
        if self._is_micro_batch:
            known = {id(before) for _, before, _ in writes.values()}
            changed = {place: c for place, c in changed.items() if not _is_alike(c.after, c.before, known)}
        else:
            changed = {place: c for place, c in changed.items() if not is_same_content(c.after, c.before)}
        if self._places is None:  # the first micro-batch may leave what it likes, since the others find it
            self._places, self._changed = set(writes), {} if self._is_micro_batch else changed
            return
        for place in filter(self._places.__contains__, writes):
            change = self._changed.get(place) or changed.get(place)
            if change is not None:
                raise _of_micro_batch(change) if self._is_micro_batch else _of_body(change)


class Change(NamedTuple):
    """What a place held before a trace of a body, and after it."""

    title: str
    before: Any
    after: Any


def _is_alike(after: Any, before: Any, known: set[int]) -> bool:
    """Whether a micro-batch that finds `after` does what one did that found `before`.

    Equal plain values are alike, and so are two tensors or objects that each micro-batch makes: the next one has its own.

    Args:
        known: ids of the values that were there when the micro-batch began.
    """
    after, before = _plain(after), _plain(before)
    if after is before or is_same_content(after, before):
        return True
    if type(after) is not type(before):
        return False
    if isinstance(after, Mapping):
        return [*after] == [*before] and all(_is_alike(after[key], before[key], known) for key in after)
    if isinstance(after, (list, tuple, collections.deque)):
        return len(after) == len(before) and all(_is_alike(a, b, known) for a, b in zip(after, before, strict=True))
    return not isinstance(after, frozenset) and id(after) not in known and made_in_trace(after)


def _plain(value: Any) -> Any:
    return value.evaluate() if type(value) is Varying else value


def _of_body(change: Change) -> TraceError:
    return TraceError(
        message(
            f"a branch or loop body in a compiled function changes {change.title}",
            *called_at(),
            f"it was {shown(change.before)} before, and is {shown(change.after)} after it",
            "only the device knows whether and how often it runs",
            fix="return a tensor instead, or update one on the device in place",
        )
    )


def _of_micro_batch(change: Change) -> TraceError:
    before, after = _plain(change.before), _plain(change.after)
    return TraceError(
        message(
            f"every micro-batch changes {change.title}, and all of them after the first are traced as one",
            *called_at(),
            f"after one of them it was {shown(before)}, after the next {shown(after)}",
            fix="change it once, after accumulate, or keep it as a tensor on the device that each one updates in place",
        )
    )


__all__ = ["BodyWrites"]
