"""An exception that leaves a traced function: the numbers that vary in it become plain, since the caller's code gets it.

raise Diverged(self.num_steps)   # except Diverged as error: error.args[0] is an int
"""

from __future__ import annotations

import collections
from typing import Any

from spmd.program.find._static import attributes_of
from spmd.program.reads._parts import is_data
from spmd.program.reads._varying import Varying


def make_plain(error: BaseException) -> None:
    """Replace the numbers that vary in an exception, in its causes, and in what they hold."""
    seen: set[int] = set()
    waiting: list[Any] = [error]
    while waiting:
        value = waiting.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, BaseException):
            value.args = _plain(value.args)
            waiting += (part for part in (value.__cause__, value.__context__, *value.args) if part is not None)
        if isinstance(value, tuple):
            waiting += value
        elif isinstance(value, (list, collections.deque)):
            for index, item in enumerate(value):
                value[index] = _plain(item)
            waiting += value
        elif isinstance(value, dict):
            for key in value:
                value[key] = _plain(value[key])
            waiting += value.values()
        elif (isinstance(value, BaseException) or is_data(value)) and (attributes := attributes_of(value)) is not None:
            waiting.append(attributes)


def _plain(value: Any) -> Any:
    if isinstance(value, Varying):
        return value.evaluate()
    return type(value)(map(_plain, value)) if type(value) is tuple and value else value


__all__ = ["make_plain"]
