"""Refuses changes of a branch, a loop body or a micro-batch to existing Python objects that would differ from those of a Python run.

A branch or loop body is traced at least twice, a branch even if it is not taken, and the number of its runs depends on values on the
device. So the host does not know its changes. All micro-batches run, but those after the first share a trace, so they may only make changes
that are the same for each. An object created by the body is a different one in each trace, so a place that two traces write to existed
before.
"""

from __future__ import annotations

import collections
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

from spmd.base._errors import TraceError, called_at, message
from spmd.program.reads import Varying, is_same_content, made_in_trace, python_writes, shown


class BodyWrites:
    """Writes of one body to Python objects, over its traces."""

    def __init__(self, *, is_micro_batch: bool = False) -> None:
        """`is_micro_batch`: the body is a micro-batch, which always runs, and sees the changes of the previous one."""
        self._is_micro_batch = is_micro_batch
        self._places: set[Any] | None = None  # places that its first trace wrote to
        self._changed: dict[Any, Change] = {}  # those that it changed

    @contextmanager
    def traced(self) -> Generator[None]:
        """Record the writes of one trace of the body; enter it around every trace.

        Raises:
            TraceError: the body leaves a Python object changed, or a micro-batch leaves it different from the previous one.
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
        if self._places is None:  # the first micro-batch may change anything, since the others see it
            self._places, self._changed = set(writes), {} if self._is_micro_batch else changed
            return
        for place in filter(self._places.__contains__, writes):
            change = self._changed.get(place) or changed.get(place)
            if change is not None:
                raise _micro_batch_error(change) if self._is_micro_batch else _body_error(change)


class Change(NamedTuple):
    """Value of a place before and after a trace of a body."""

    title: str
    before: Any
    after: Any


def _is_alike(after: Any, before: Any, known: set[int]) -> bool:
    """Whether a micro-batch behaves the same for `after` as for `before`.

    It does for equal plain values, and for two tensors or objects that are created by each micro-batch.

    Args:
        known: ids of the values that existed when the micro-batch began.
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


def _body_error(change: Change) -> TraceError:
    return TraceError(
        message(
            f"a branch or loop body in a compiled function changes {change.title}",
            *called_at(),
            f"it was {shown(change.before)} before, and is {shown(change.after)} after it",
            "only the device knows whether and how often the body runs",
            fix="return a tensor instead, or update one on the device in place",
        )
    )


def _micro_batch_error(change: Change) -> TraceError:
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
