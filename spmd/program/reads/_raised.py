"""An exception that leaves a traced function: the numbers that vary in it become plain, since the caller's code gets it.

raise Diverged(self.num_steps)   # except Diverged as error: error.args[0] is an int
"""

from __future__ import annotations

import collections
from typing import Any

from spmd.program.find._static import attributes_of, slots_of
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
            for descriptor, part in slots_of(value).items():  # slots, and fields in C such as `SystemExit.code`
                if (plain := _plain(part)) is not part:
                    descriptor.__set__(value, plain)
                waiting.append(plain)
        if isinstance(value, tuple):
            waiting += value
        elif isinstance(value, (list, collections.deque)):
            for index, item in enumerate(value):
                if (plain := _plain(item)) is not item:
                    value[index] = plain
            waiting += value
        elif isinstance(value, dict):
            for key, item in value.items():
                if (plain := _plain(item)) is not item:
                    value[key] = plain
            waiting += value.values()
        elif (isinstance(value, BaseException) or is_data(value)) and (attributes := attributes_of(value)) is not None:
            waiting.append(attributes)


def _plain(value: Any) -> Any:
    if isinstance(value, Varying):
        return value.evaluate()
    if type(value) is not tuple:
        return value
    made = tuple(map(_plain, value))
    return value if all(a is b for a, b in zip(made, value, strict=True)) else made


__all__ = ["make_plain"]
